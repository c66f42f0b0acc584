"""Random weights, to run a model's shape without its weight files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.quantized import FP8_BLOCK, Fp8Weight, Weight
from eagleray.models.weights import Cut, Param, Part, Quantizers, WeightRole

BLOCK = 1 << 20
"""Count of numbers that are drawn and then repeated; drawing billions would take minutes."""

STANDARD_DEVIATION = 0.05

FP8_SCALE = 2.0**-9
"""Scale that puts the random numbers into the middle of float8's range."""

SCALE_BYTE = 121
"""An E8M0 scale of 2 ** -6, because four-bit numbers go up to 6."""


class DummyWeights:
    """Random `Weights`. A seed gives the same weights on any device and however they are cut; in FP8 they are the same
    up to rounding. `has_fp8`: the weights of linear layers are in FP8; `quantizers`: see
    `WeightRules`."""

    def __init__(
        self,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        has_fp8: bool = False,
        quantizers: Quantizers | None = None,
    ) -> None:
        self._dtype = dtype
        self._quantizers = quantizers or {}
        self._has_fp8 = has_fp8
        self.kept_fp8: set[str] = set()
        """The first name of each weight that is in FP8."""
        generator = torch.Generator().manual_seed(seed)
        block = torch.randn(BLOCK, generator=generator) * STANDARD_DEVIATION
        self._numbers = block.to(device=device, dtype=dtype)
        self._fp8_numbers = (block / FP8_SCALE).to(device=device, dtype=torch.float8_e4m3fn)
        self._bytes = torch.randint(256, (BLOCK,), generator=generator, dtype=torch.uint8).to(device)

    def load(self, param: Param) -> Tensor:
        if param.dtype == torch.uint8:
            return self._load_bytes(param)
        out = self._filled(param, self._numbers).to(param.dtype or self._dtype)
        return torch.ones_like(out) if param.name.endswith("norm.weight") else out

    def load_concatenated(self, params: Sequence[Param]) -> Tensor:
        return torch.cat([self.load(param) for param in params])

    def load_weight(self, params: Sequence[Param]) -> Weight:
        if not self._has_fp8:
            return self.quantize(self.load_concatenated(params), params[0].role)
        self.kept_fp8.add(params[0].name)
        parts = [self._filled(param, self._fp8_numbers) for param in params]
        values = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
        num_blocks = [-(-size // step) for size, step in zip(values.shape, FP8_BLOCK, strict=True)]
        return Fp8Weight(values, torch.full(num_blocks, FP8_SCALE, device=values.device), FP8_BLOCK)

    def load_head(self, param: Param) -> Weight:
        return self.load(param)

    def quantize(self, weight: Tensor, role: WeightRole = WeightRole.FEED_FORWARD) -> Weight:
        quantizer = self._quantizers.get(role)
        return weight if quantizer is None else quantizer(weight)

    def _load_bytes(self, param: Param) -> Tensor:
        """Return the blocks or the scales of four-bit weights (`mxfp4.py`)."""
        out = self._bytes.new_empty(param.local_shape)
        if param.name.endswith("_scales"):
            return out.fill_(SCALE_BYTE)
        _fill(out.view(-1), self._bytes, _start(param))
        return out

    def _filled(self, param: Param, block: Tensor) -> Tensor:
        """Return this rank's shard of a tensor of the numbers in `block`."""
        out, start = block.new_empty(param.local_shape), _start(param)
        row_size = torch.Size(param.shape[1:]).numel()
        if not isinstance(param.shard, Cut):
            _fill(out.view(-1), block, start)
        elif param.shard.dim == 0:
            _fill(out.view(-1), block, start + param.shard.span.start * row_size)
        else:
            _fill_columns(out, block, start, row_size, param.shard.span)
        return out


def _start(param: Param) -> int:
    """Return the place in the block where a tensor begins, so that tensors and experts differ."""
    name = f"{param.name}.{param.shard.index}" if isinstance(param.shard, Part) else param.name
    return zlib.crc32(name.encode())


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
