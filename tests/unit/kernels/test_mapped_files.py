"""Weights in mapped files, or in several parts, are packed as those in one tensor are."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from torch import Tensor

from eagleray.errors import CheckpointError
from eagleray.kernels.cpu import mapped_files
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.cpu.mapped_files import MappedFile
from eagleray.kernels.quantized import LoadedWeight, RowParts

OFFSET = 64
"""Byte at which a tensor begins in its file."""


@pytest.fixture
def backend(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> CpuBackend:
    monkeypatch.setattr(mapped_files, "PIECE_BYTES", 5000)  # several pieces of each weight here, the last one partial
    return CpuBackend(library, torch.bfloat16, num_threads=1)


def mapped(weight: Tensor, path: Path) -> Tensor:
    """Return the weight as a tensor in a file."""
    path.write_bytes(bytes(OFFSET) + weight.view(torch.uint8).numpy().tobytes())
    with path.open("rb") as file:
        whole = MappedFile.open(path, file.fileno(), path.stat().st_size)
    return whole[OFFSET:].view(weight.dtype).view(weight.shape)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(torch.bfloat16)


@pytest.mark.parametrize("num_rows", [31, 64, 200])
def test_pack_linear_mapped_file_equals_memory(backend: CpuBackend, tmp_path: Path, num_rows: int) -> None:
    weight = random(num_rows, 40)
    packed = backend.pack_linear(mapped(weight, tmp_path / "weight"), None).packed
    assert torch.equal(packed, backend.pack_linear(weight, None).packed)


@pytest.mark.parametrize("has_mapped", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("inner", [16, 150])
def test_pack_gated_linear_halves_in_files_or_memory_equal_one_tensor(
    backend: CpuBackend, tmp_path: Path, inner: int, has_mapped: tuple[bool, bool]
) -> None:
    weight = random(2 * inner, 40)
    halves = [half.clone() for half in weight.chunk(2)]
    parts = RowParts(
        tuple(
            mapped(half, tmp_path / str(number)) if is_mapped else half
            for number, (half, is_mapped) in enumerate(zip(halves, has_mapped, strict=True))
        )
    )
    packed = backend.pack_gated_linear(parts, None, None).packed
    assert torch.equal(packed, backend.pack_gated_linear(weight, None, None).packed)


@pytest.mark.parametrize("sizes", [(64, 32, 32), (64, 32, 7), (10, 50, 3)])
def test_pack_linear_parts_equal_one_tensor(backend: CpuBackend, tmp_path: Path, sizes: tuple[int, ...]) -> None:
    weight = random(sum(sizes), 40)
    parts = [part.clone() for part in weight.split(sizes)]
    parts[1] = mapped(parts[1], tmp_path / "part")
    weights: list[LoadedWeight] = [weight, RowParts(tuple(parts))]
    whole, joined = (backend.pack_linear(each, None).packed for each in weights)
    assert torch.equal(joined, whole)


def test_pack_linear_truncated_file_is_named(backend: CpuBackend, tmp_path: Path) -> None:
    path = tmp_path / "weight"
    weight = mapped(random(200, 40), path)
    with path.open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(CheckpointError, match=f"{path}: was truncated"):
        backend.pack_linear(weight, None)
