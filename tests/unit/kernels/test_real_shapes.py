"""Every Triton kernel against float32: at the shapes of published models on a GPU, and in tiny sizes interpreted, which
shows that the benchmark's cases are right."""

from __future__ import annotations

import pytest
import torch
from gpu_case import KernelCase, relative_error
from gpu_kernels import CASES

CPU = torch.device("cpu")


def small_cases() -> list[KernelCase]:
    """Return one case of those that are the same in tiny sizes."""
    distinct = {(case.kernel, repr({**case.sizes, **case.small})): case for case in CASES}
    return list(distinct.values())


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: case.name)
def test_kernel_case_in_tiny_sizes_equals_float32(case: KernelCase) -> None:
    torch.manual_seed(0)
    run = case.prepare(CPU, is_small=True)
    assert relative_error(run) <= run.tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_kernel_at_real_shape_equals_float32(case: KernelCase) -> None:
    torch.manual_seed(0)
    run = case.prepare(torch.device("cuda"), is_small=False)
    assert relative_error(run) <= run.tolerance
    del run
    torch.cuda.empty_cache()  # other tests use the same GPU


def test_kernel_cases_have_names_of_their_own() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
