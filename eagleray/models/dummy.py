"""Random weights, to run a model's shape without its weight files."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.models.weights import Cut

BLOCK = 1 << 20
"""Count of numbers that are drawn and then repeated; drawing billions would take minutes."""

STANDARD_DEVIATION = 0.05

SCALE_BYTE = 121
"""An E8M0 scale of 2 ** -6, because four-bit numbers go up to 6."""


class DummyWeights:
    """Random `Weights`. A seed gives the same weights on any device and however they are cut."""

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.dtype = dtype
        self._seed = seed
        self.num_parameters = 0
        self._lock = threading.Lock()
        block = torch.randn(BLOCK, generator=torch.Generator().manual_seed(seed)) * STANDARD_DEVIATION
        self._block = block.to(device=device, dtype=dtype)

    def load(
        self, name: str, shape: tuple[int, ...], cut: Cut | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        cut = cut or Cut(0, range(shape[0]))
        out = self._block.new_empty(cut.shape(shape), dtype=dtype)
        with self._lock:
            self.num_parameters += out.numel()
        if name.endswith("norm.weight"):
            return out.fill_(1)
        start = zlib.crc32(name.encode())  # so that layers differ
        row_size = torch.Size(shape[1:]).numel()
        if cut.dim == 0:
            self._fill(out.view(-1), start + cut.span.start * row_size)
        else:
            self._fill_columns(out, start, row_size, cut.span)
        return out

    def load_part(self, name: str, shape: tuple[int, ...], index: int) -> Tensor:
        return self.load(f"{name}.{index}", shape[1:])

    def load_bytes(self, name: str, shape: tuple[int, ...], index: int, *, parameters: int) -> Tensor:
        """Return the bytes of four-bit weights (`mxfp4.py`)."""
        shape = shape[1:]
        with self._lock:
            self.num_parameters += torch.Size(shape).numel() * parameters
        if name.endswith("_scales"):
            return torch.full(shape, SCALE_BYTE, dtype=torch.uint8, device=self._block.device)
        generator = torch.Generator().manual_seed(self._seed + zlib.crc32(f"{name}.{index}".encode()))
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8).to(self._block.device)

    def load_concatenated(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], cuts: Sequence[Cut | None] | None = None
    ) -> Tensor:
        cuts = cuts or [None] * len(names)
        return torch.cat([self.load(*wanted) for wanted in zip(names, shapes, cuts, strict=True)])

    def _fill(self, out: Tensor, start: int) -> None:
        """Fill `out` from the endlessly repeated block, beginning at `start`."""
        start %= BLOCK
        filled = 0
        while filled < len(out):
            part = self._block[start : start + len(out) - filled]
            out[filled : filled + len(part)] = part
            filled += len(part)
            start = 0

    def _fill_columns(self, out: Tensor, start: int, row_size: int, columns: range) -> None:
        at_once = max(1, BLOCK // row_size)
        whole = out.new_empty(at_once, row_size)
        for first in range(0, len(out), at_once):
            rows = out[first : first + at_once]
            self._fill(whole[: len(rows)].view(-1), start + first * row_size)
            rows.copy_(whole[: len(rows), columns.start : columns.stop])
