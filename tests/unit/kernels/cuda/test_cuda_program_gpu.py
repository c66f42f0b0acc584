"""The program of NVIDIA GPUs on one: graphs compute what their launches do, and steps do not wait for the device."""

from __future__ import annotations

import pytest
import torch
from cuda_passes import DECODES, LONG, MIXED, Layers, Pass, batch_of, cuda_pass

from eagleray.kernels.cuda.graphs import CallCapture
from eagleray.kernels.forward_batch import PassLimits
from eagleray.kernels.torch.backend import TorchBackend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
LIMITS = PassLimits(num_tokens=32, num_rows=8, num_positions=40)
STEPS = 3 * [DECODES, MIXED, LONG, [(4, 1)], DECODES]


def ready(*, dtype: torch.dtype = torch.bfloat16) -> tuple[Pass, torch.Tensor]:
    """Return a pass with all graphs captured, and the tensor of last tokens that they read."""
    run = cuda_pass(captures=True, device=CUDA, dtype=dtype).fill()
    last_tokens = torch.arange(8, dtype=torch.int64, device=CUDA)
    run.program.reserve(LIMITS)
    run.program.capture(last_tokens)
    return run, last_tokens


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_run_graphs_have_the_bits_of_their_launches(dtype: torch.dtype) -> None:
    graphs, last_tokens = ready(dtype=dtype)
    launches = cuda_pass(captures=True, device=CUDA, dtype=dtype).fill()
    launches.program._capture = CallCapture()
    launches.program.reserve(LIMITS)
    for seed, rows in enumerate(STEPS):
        batch = batch_of(rows, seed=seed, last_tokens=last_tokens)
        assert torch.equal(graphs.run(batch), launches.run(batch))
    for one, other in zip(graphs.cache.layers, launches.cache.layers, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rows", [DECODES, MIXED, LONG])
def test_run_in_float32_equals_plain_torch(rows: list[tuple[int, int]]) -> None:
    reference = TorchBackend()
    expected = Pass(reference, Layers(reference, device=CUDA).model, device=CUDA).fill()
    found, _ = ready(dtype=torch.float32)
    torch.testing.assert_close(found.run(batch_of(rows)), expected.run(batch_of(rows)), atol=1e-4, rtol=1e-4)


def test_run_after_capture_waits_for_nothing_and_allocates_nothing() -> None:
    run, last_tokens = ready()
    batches = [batch_of(rows, seed=seed, last_tokens=last_tokens) for seed, rows in enumerate(STEPS)]
    for batch in batches:
        run.forward(batch.token_ids, batch, run.cache)
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches:
            run.forward(batch.token_ids, batch, run.cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
