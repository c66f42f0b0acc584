"""Tests that numbers of a batch do not make Triton compile another version of a kernel, which would delay a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from eagleray.kernels.cuda.triton import attention, decode_attention, mla, routing

STRIDES = (1, 3, 16)
"""Triton compiles a kernel for integers that are 1 and for multiples of 16, if it may."""


def version(kernel: Any, parameter: str, value: object) -> list[Any]:
    """Return what chooses the version of a kernel, if all but one of its arguments stay the same."""
    function = JITFunction(kernel.fn, **kernel.kwargs)
    specialize = create_function_from_signature(
        function.signature, function.params, CUDABackend(GPUTarget("cuda", 90, 32))
    )
    arguments = dict.fromkeys(function.signature.parameters, 2) | {parameter: value}
    _, specialization, _ = specialize(**arguments)
    assert isinstance(specialization, list)
    return specialization


@pytest.mark.parametrize(
    "kernel",
    [
        attention._attend_tiles_kernel,
        decode_attention._attend_splits_kernel,
        mla._attend_latent_tiles_kernel,
        mla._attend_latent_splits_kernel,
    ],
)
def test_attention_kernel_width_of_block_table_changes_has_same_version(kernel: Any) -> None:
    first, *others = (version(kernel, "block_table_stride", stride) for stride in STRIDES)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("kernel", "parameter"),
    [
        (decode_attention._attend_splits_kernel, "maxima"),
        (decode_attention._attend_splits_kernel, "sums"),
        (decode_attention._merge_splits_kernel, "maxima"),
        (decode_attention._merge_splits_kernel, "sums"),
        (mla._attend_latent_splits_kernel, "maxima"),
        (mla._attend_latent_splits_kernel, "sums"),
        (routing._sum_chunks, "totals"),
        (routing._place, "totals"),
    ],
)
def test_kernel_part_of_workspace_begins_elsewhere_has_same_version(kernel: Any, parameter: str) -> None:
    memory = torch.zeros(8)
    assert version(kernel, parameter, memory[1:]) == version(kernel, parameter, memory[4:])


def test_version_of_specialized_parameter_changes() -> None:
    """The comparison above sees a difference where there is one."""
    memory, kernel = torch.zeros(8), routing._place
    assert version(kernel, "counts", memory[1:]) != version(kernel, "counts", memory[4:])
