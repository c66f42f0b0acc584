"""Random weights, to run a model's shape without its weight files."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.quantized import FP8_BLOCK, Fp8Weight, Weight, quantize_fp8
from eagleray.models.weights import Cut

BLOCK = 1 << 20
"""Count of numbers that are drawn and then repeated; drawing billions would take minutes."""

STANDARD_DEVIATION = 0.05

FP8_SCALE = 2.0**-9
"""Scale that puts the random numbers into the middle of float8's range."""

SCALE_BYTE = 121
"""An E8M0 scale of 2 ** -6, because four-bit numbers go up to 6."""


class DummyWeights:
    """Random `Weights`. A seed gives the same weights on any device and however they are cut; in FP8 they are the same
    up to rounding. `has_fp8`: the weights of linear layers are in FP8."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int, has_fp8: bool = False) -> None:
        self.dtype = dtype
        self.num_parameters = 0
        self._has_fp8 = has_fp8
        self._lock = threading.Lock()
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(BLOCK, generator=generator) * STANDARD_DEVIATION
        self._numbers = block.to(device=device, dtype=dtype)
        self._fp8_numbers = (block / FP8_SCALE).to(device=device, dtype=torch.float8_e4m3fn)
        self._bytes = torch.randint(256, (BLOCK,), generator=generator, dtype=torch.uint8).to(device)

    def load(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        out = self._filled(name, shape, cut, self._numbers).to(dtype or self.dtype)
        return torch.ones_like(out) if name.endswith("norm.weight") else out

    def load_part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        return self.load(f"{name}.{index}", shape[1:])

    def load_bytes(self, name: str, shape: tuple[int, ...], index: int, *, parameters: int) -> Tensor:
        """Return the bytes of four-bit weights (`mxfp4.py`)."""
        shape = shape[1:]
        with self._lock:
            self.num_parameters += torch.Size(shape).numel() * parameters
        out = self._bytes.new_empty(shape)
        if name.endswith("_scales"):
            return out.fill_(SCALE_BYTE)
        _fill(out.view(-1), self._bytes, zlib.crc32(f"{name}.{index}".encode()))
        return out

    def load_concatenated(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Tensor:
        cuts = cuts or [None] * len(names)
        return torch.cat([self.load(*wanted) for wanted in zip(names, shapes, cuts, strict=True)])

    def load_weight(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Weight:
        if not self._has_fp8:
            return self.load_concatenated(names, shapes, cuts)
        cuts = cuts or [None] * len(names)
        parts = [self._filled(*wanted, self._fp8_numbers) for wanted in zip(names, shapes, cuts, strict=True)]
        values = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        num_blocks = [-(-size // step) for size, step in zip(values.shape, FP8_BLOCK, strict=True)]
        return Fp8Weight(values, torch.full(num_blocks, FP8_SCALE, device=values.device), FP8_BLOCK)

    def quantize(self, weight: Tensor) -> Weight:
        return quantize_fp8(weight) if self._has_fp8 else weight

    def _filled(self, name: str, shape: tuple[int, ...], cut: Cut | None, block: Tensor) -> Tensor:
        """Return a tensor, or the part `cut` of it, of the numbers in `block`."""
        cut = cut or Cut(0, range(shape[0]))
        out = block.new_empty(cut.shape(shape))
        with self._lock:
            self.num_parameters += out.numel()
        start = zlib.crc32(name.encode())  # so that layers differ
        row_size = torch.Size(shape[1:]).numel()
        if cut.dim == 0:
            _fill(out.view(-1), block, start + cut.span.start * row_size)
        else:
            _fill_columns(out, block, start, row_size, cut.span)
        return out


def _fill(out: Tensor, block: Tensor, start: int) -> None:
    """Fill `out` from the endlessly repeated block, beginning at `start`."""
    start %= BLOCK
    filled = 0
    while filled < len(out):
        part = block[start : start + len(out) - filled]
        out[filled : filled + len(part)] = part
        filled += len(part)
        start = 0


def _fill_columns(out: Tensor, block: Tensor, start: int, row_size: int, columns: range) -> None:
    at_once = max(1, BLOCK // row_size)
    whole = block.new_empty(at_once, row_size)
    for first in range(0, len(out), at_once):
        rows = out[first : first + at_once]
        _fill(whole[: len(rows)].view(-1), block, start + first * row_size)
        rows.copy_(whole[: len(rows), columns.start : columns.stop])
