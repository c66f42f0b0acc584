"""Passes with adapters by the kernels of NVIDIA GPUs, interpreted on a CPU: their modes agree, batches without adapters
launch nothing for them, and the memory is fixed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_passes import CPU, DECODES, HEAD_DIM, INNER, LIMITS, LONG, MIXED, SIZE, Layers, Pass, Rows, batch_of
from no_host_reads import no_host_reads
from quantized_weights import dequantized, random_weight
from torch import Tensor
from triton.runtime.interpreter import InterpretedFunction

from eagleray.kernels.adapters import AdapterSite, AdapterTable, LowRankFactors
from eagleray.kernels.cuda import adapters as adapters_module
from eagleray.kernels.cuda import program as program_module
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.cuda.graphs import CallCapture
from eagleray.kernels.cuda.linear import CudaLinear
from eagleray.kernels.forward_batch import AdapterGroups, ForwardBatch
from eagleray.kernels.memory_release import ReleasableStorages
from eagleray.kernels.params import ClampedSwiglu
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.functional import clamped_swiglu, silu_and_mul

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
NUM_SLOTS, MAX_RANK = 4, 6
RANKS = (6, 2, 5)
"""Rank of the adapter in each slot; the last slot is empty."""


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_module, "TOKEN_BUCKETS", (8, 12, 16))
    monkeypatch.setattr(program_module, "DECODE_BUCKETS", (1, 2, 3, 4))


@pytest.fixture
def products_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of rows that do not depend on the number of rows, as the processor's library does not."""

    def multiply(self: CudaLinear, x: Tensor, out: Tensor) -> None:
        for row in range(len(x)):
            out[row] = self.weight @ x[row]
            if self.bias is not None:
                out[row] += self.bias

    monkeypatch.setattr(CudaLinear, "multiply_without_gate", multiply)


@dataclass
class Adapted:
    """A pass of one layer with adapters."""

    run: Pass
    table: AdapterTable
    sites: list[AdapterSite]

    @classmethod
    def of(
        cls, backend: TorchBackend | CudaBackend, *, device: torch.device = CPU, dtype: torch.dtype = torch.float32
    ) -> Adapted:
        layers = Layers(backend, device=device, dtype=dtype)
        table = AdapterTable(NUM_SLOTS, MAX_RANK, dtype, device)
        shapes = {
            "qkv": (SIZE, (2 * HEAD_DIM, HEAD_DIM, HEAD_DIM)),
            "project": (2 * HEAD_DIM, (SIZE,)),
            "gate_up": (SIZE, (INNER, INNER)),
            "down": (INNER, (SIZE,)),
        }
        sites = []
        generator = torch.Generator().manual_seed(1)
        for name, (in_features, out_features) in shapes.items():
            site = backend.adapter_site(table, in_features, out_features)
            setattr(layers, name, backend.adapt(getattr(layers, name), site))
            sites.append(site)
            for slot, rank in enumerate(RANKS):
                for layer, size in enumerate(out_features):
                    a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
                    site.write(slot, layer, LowRankFactors(a, torch.randn(size, rank, generator=generator), 0.5))

        def compute(token_ids: Any, caches: Any, context: Any) -> Any:
            return layers.norms[0](layers.dense(layers.embed(token_ids), caches[0], context))

        return cls(Pass(backend, compute, device=device, dtype=dtype).fill(), table, sites)

    def __call__(self, batch: ForwardBatch) -> Tensor:
        self.table.groups = batch.adapters
        return self.run.run(batch)


def cuda(*, captures: bool = True) -> Adapted:
    return Adapted.of(CudaBackend(torch.float32, captures=captures))


def with_adapters(rows: Rows, *, seed: int = 0) -> ForwardBatch:
    """A batch whose tokens have adapters or none, at random, but at least one."""
    batch = batch_of(rows, seed=seed)
    slots = np.random.default_rng(seed).integers(-1, len(RANKS), batch.num_tokens).astype(np.int32)
    slots[-1] = 1
    return replace(batch, adapters=AdapterGroups.of(slots))


@pytest.mark.parametrize("rows", [DECODES, MIXED, LONG])
def test_run_with_adapters_equals_plain_torch(rows: Rows) -> None:
    batch = with_adapters(rows)
    found, expected = cuda()(batch), Adapted.of(TorchBackend())(batch)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [DECODES, MIXED])
@pytest.mark.usefixtures("products_by_row")
def test_run_with_adapters_padded_to_its_bucket_has_the_bits_of_the_list(rows: Rows) -> None:
    batch = with_adapters(rows)
    padded = cuda()
    assert torch.equal(padded(batch), cuda(captures=False)(batch))
    plans = padded.run.program._decode_plans if rows is DECODES else padded.run.program._piece_plans
    assert list(plans) == [(4 if rows is DECODES else 16, NUM_SLOTS)], "a power of two"


@pytest.mark.usefixtures("products_by_row")
def test_run_without_adapters_launches_nothing_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    adapted, plain = cuda(), cuda()
    adapted.run.program.reserve(LIMITS)
    assert adapted.run.program.capture() == (4 + 3) + (3 + 2)
    adapted(with_adapters(DECODES))
    expected = [plain(batch_of(rows)) for rows in (DECODES, MIXED)]

    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a batch without adapters")

    monkeypatch.setattr(adapters_module, "shrink", refuse)
    monkeypatch.setattr(adapters_module, "expand", refuse)
    assert [torch.equal(adapted(batch_of(rows)), y) for rows, y in zip((DECODES, MIXED), expected, strict=True)]
    with pytest.raises(AssertionError, match="without adapters"):
        adapted(with_adapters(DECODES))


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.float32),
        pytest.param("cuda", torch.bfloat16, marks=ON_GPU),
        pytest.param("cuda", torch.float32, marks=ON_GPU),
    ],
)
def test_graphs_with_adapters_have_the_bits_of_their_launches(device: str, dtype: torch.dtype) -> None:
    """Also when an adapter was replaced meanwhile, and in steps without adapters between the others."""
    options = {"device": torch.device(device), "dtype": dtype}
    graphs, launches = (Adapted.of(CudaBackend(dtype), **options) for _ in range(2))
    launches.run.program._capture = CallCapture()
    for each in (graphs, launches):
        each.run.program.reserve(LIMITS)
        each.run.program.capture()
    steps = [(DECODES, True), (DECODES, False), (MIXED, True)] * (1 if device == "cpu" else 4)
    for seed, (rows, has_adapters) in enumerate(steps):
        batch = with_adapters(rows, seed=seed) if has_adapters else batch_of(rows, seed=seed)
        assert torch.equal(graphs(batch), launches(batch))
        for each in (graphs, launches):
            each.sites[3].clear(seed % 2)
            each.sites[3].write(seed % 2, 0, LowRankFactors(torch.ones(3, INNER), torch.ones(SIZE, 3), 0.1))


def test_run_reads_adapters_that_were_written_between_steps() -> None:
    adapted, expected = cuda(), Adapted.of(TorchBackend())
    batch = with_adapters(DECODES)
    before = adapted(batch)
    for each in (adapted, expected):
        each.run.fill()
        for site in each.sites:
            site.clear(1)
        each.sites[3].write(1, 0, LowRankFactors(torch.ones(3, INNER), torch.ones(SIZE, 3), 1.0))
    found = adapted(batch)
    assert not torch.allclose(found, before, atol=1e-3)
    torch.testing.assert_close(found, expected(batch), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", [DECODES, MIXED])
def test_run_with_adapters_reads_nothing_back(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that do nothing, only Python's side of a step is left: it may not read the device."""
    adapted, batch = cuda(), with_adapters(rows)
    adapted(batch)
    launched: list[str] = []

    def launch(self: InterpretedFunction, grid: object) -> Callable[..., None]:
        return lambda *arguments, **options: launched.append(self.__name__)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", launch)
    with no_host_reads():  # raises an error at a read
        adapted(batch)
    assert sum("shrink" in name for name in launched) == sum("expand" in name for name in launched) == 4, launched


def test_num_bytes_with_adapters_is_the_memory_that_is_allocated() -> None:
    program = cuda().run.program
    program.reserve(LIMITS)
    memory = program._memory
    assert memory is not None
    tensors = memory.buffers, memory.scratch, memory.metadata.whole, memory.cos, memory.sin
    assert 0 <= sum(tensor.nbytes for tensor in tensors) - program.num_bytes(LIMITS) <= 1024
    program.warm_up(LIMITS, None)
    assert program._memory is memory


def test_adapters_released_and_restored_serve_a_new_program() -> None:
    adapted, batch = cuda(), with_adapters(MIXED)
    expected = adapted(batch)
    factors = [part for site in adapted.sites for part in site.storage()]
    memory = ReleasableStorages(factors)
    adapted.run.forward.release()
    assert memory.release(keeps=True) == sum(part.nbytes for part in factors)
    memory.restore()
    adapted.run.fill()
    assert torch.equal(adapted(batch), expected)


@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
@pytest.mark.parametrize("clamp", [None, ClampedSwiglu(alpha=1.702, limit=0.8)])
def test_run_adapters_beside_quantized_weights_are_added_before_the_gate(
    kind: str, clamp: ClampedSwiglu | None
) -> None:
    torch.manual_seed(0)
    backend, inner = CudaBackend(torch.float32), 32
    weights = [
        random_weight(kind, (2 * inner, SIZE * 2), torch.float32),
        random_weight(kind, (SIZE * 2, inner), torch.float32),
    ]
    bias, table = torch.randn(2 * inner), AdapterTable(1, 4, torch.float32, CPU)
    products = [backend.gated_linear(weights[0], bias, clamp), backend.linear(weights[1], None)]
    sites = [backend.adapter_site(table, 2 * SIZE, (inner, inner)), backend.adapter_site(table, inner, (2 * SIZE,))]
    factors = [
        [LowRankFactors(torch.randn(4, site.in_features) / 4, torch.randn(size, 4), 0.5) for size in site.out_features]
        for site in sites
    ]
    for site, of_site in zip(sites, factors, strict=True):
        for layer, each in enumerate(of_site):
            site.write(0, layer, each)
    adapted = [backend.adapt(*pair) for pair in zip(products, sites, strict=True)]
    run = Pass(backend, lambda x, caches, context: adapted[1](adapted[0](x)))
    x = torch.randn(3, 2 * SIZE)

    def expected(has_adapter: bool) -> Tensor:
        plain = [dequantized(weight, torch.float32) for weight in weights]
        added = [torch.cat([each.scale * each.b @ each.a for each in of_site]) for of_site in factors]
        first, second = (a + has_adapter * b for a, b in zip(plain, added, strict=True))
        gate_up = x.double() @ first.T.double() + bias
        gated = silu_and_mul(gate_up) if clamp is None else clamped_swiglu(gate_up, clamp)
        return (gated @ second.T.double()).float()

    batch = batch_of([(0, 3)])
    adapted_batch = replace(batch, adapters=AdapterGroups.of(np.array([0, -1, 0], np.int32)))
    torch.testing.assert_close(run.run(batch, x), expected(False), atol=1e-4, rtol=1e-4)
    found = run.run(adapted_batch, x)
    torch.testing.assert_close(found[[0, 2]], expected(True)[[0, 2]], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found[1], expected(False)[1], atol=1e-4, rtol=1e-4)
