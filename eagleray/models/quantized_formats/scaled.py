"""Weights of 8 bits in tensors of their own shape, `weight`, and scales beside them, `weight_scale`: FP8 numbers, or
int8 numbers minus `weight_zero_point`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from eagleray.kernels.grouped import Encoding, GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.quantized_formats.codes import integer_weight, of_signed
from eagleray.models.quantized_formats.scales import Sharing, read_scales
from eagleray.models.quantized_formats.stored_tensors import FLOATS, MatrixPart, StoredTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFormat:
    """See `StoredFormat`."""

    method: str
    is_float: bool
    """Whether numbers are FP8 and not int8."""
    sharing: Sharing
    is_symmetric: bool = True
    """Whether there are no zero points."""
    has_quantized_inputs: bool = True

    weight_suffix = "weight"
    other_suffixes = ("weight_scale", "weight_zero_point", "input_scale", "input_zero_point")
    numbers_per_word = 1

    @property
    def kept_as(self) -> WeightFormat:
        return WeightFormat.FP8 if self.is_float else WeightFormat.INT8

    @property
    def weight_kinds(self) -> tuple[str, ...]:
        return ("F8_E4M3",) if self.is_float else ("I8",)

    def read(self, part: MatrixPart, tensors: StoredTensors) -> GroupedWeight:
        rows, columns = (slice(span.start, span.stop) for span in (part.rows, part.columns))
        stored = tensors.read(part.name("weight"), self.weight_kinds, part.shape, rows, columns).contiguous()
        block = self.sharing.block_of(part, tensors, "weight_scale")
        scales = read_scales(part, tensors, part.name("weight_scale"), FLOATS, block)
        if self.is_float:
            return GroupedWeight(stored.view(torch.uint8), scales.float(), Encoding.E4M3)
        zeros = None
        if not self.is_symmetric:
            zeros = of_signed(read_scales(part, tensors, part.name("weight_zero_point"), ("I8",), block))
        return integer_weight(of_signed(stored), scales, zeros, bits=8)
