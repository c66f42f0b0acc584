from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from triton_compile import HOPPER_FIRST, MAX_SHARED_BYTES, compile_kernel

from eagleray.kernels.cuda.triton import logit_adjustments, sampling, sampling_records
from eagleray.kernels.cuda.triton.sampling import SamplingTensors, SamplingWorkspace

VOCAB_SIZE = 151_936
TYPES = {torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
MODULES = (logit_adjustments, sampling, sampling_records)


class Recorder:
    """Stands for a kernel, and records its launches."""

    def __init__(self, kernel: Any, launches: list[tuple[Any, dict[str, Any], dict[str, Any]]]) -> None:
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(size > 0 for size in grid)
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in ("num_warps", "enable_fp_fusion") if name in kwargs}
        names = self.kernel.arg_names
        self.launches.append((self.kernel, dict(zip(names, args, strict=False)) | kwargs, options))


def tensor(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch_all(rows: int = 4) -> None:
    """Launch each kernel in every configuration."""
    words, indices = tensor(1000), tensor(rows)
    tensors = SamplingTensors(
        logits=tensor(rows, VOCAB_SIZE, dtype=torch.float32),
        rows=indices,
        positions=indices,
        memory=words,
        counts=tensor(rows, VOCAB_SIZE),
        last_tokens=indices,
        token_ids=indices,
        status=indices,
    )
    workspace = SamplingWorkspace.allocate(rows, VOCAB_SIZE, torch.device("meta"))
    for is_adjusted in (False, True):
        for is_chosen in (False, True):
            sampling.find_first(tensors, workspace, is_adjusted=is_adjusted, is_chosen=is_chosen)
    for by_weight in (False, True):
        sampling.cut_front(tensors, workspace, by_weight=by_weight)
    sampling.draw(tensors, workspace)
    logits, memory = tensors.logits, tensors.memory
    logit_adjustments.keep_masked(logits, indices, tensor(rows, VOCAB_SIZE // 32))
    logit_adjustments.keep_allowed(logits, memory, indices)
    logit_adjustments.forbid_bad_words(logits, memory, indices, indices)
    logit_adjustments.suppress(logits, memory, indices, indices)
    logit_adjustments.add_bias(logits, memory, indices)
    logit_adjustments.penalise(logits, memory, indices, tensors.counts)
    sampling_records.apply_segments(memory, words, 12, 3)
    sampling_records.write_counts(tensors.counts, words, 12, 3)
    sampling_records.collect_reported(memory, indices, indices, indices, out=tensor(rows, 3, dtype=torch.int64))


# `test_triton_routing.py` compiles kernels without products of matrices for the other GPUs.
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_sampling_kernels_compile_without_spills(
    capability: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launches: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
    for module in MODULES:
        for name, value in vars(module).copy().items():
            if type(value).__name__ == "InterpretedFunction" and value.fn.__module__ == module.__name__:
                monkeypatch.setattr(module, name, Recorder(value, launches))
    launch_all()
    compiled = set()
    for kernel, arguments, options in launches:
        signature, constants = {}, {}
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                signature[name] = TYPES[value.dtype]
            elif name.isupper():
                constants[name] = value
            else:
                signature[name] = "i32"
        configuration = (kernel.fn.__name__, *sorted(constants.items()))
        if configuration in compiled:
            continue
        compiled.add(configuration)
        result = compile_kernel(
            kernel,
            signature,
            constants,
            capability=capability,
            num_warps=options.get("num_warps", 4),
            num_stages=3,
            directory=tmp_path,
        )
        assert not result.spills, configuration
        assert result.shared_bytes <= MAX_SHARED_BYTES
    assert len(compiled) == 20
