"""Weights of 8 bits in tensors of their own shape, `weight`, and scales beside them, `weight_scale`: FP8 numbers, or
int8 numbers minus `weight_zero_point`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from eagleray.kernels.grouped import Encoding, GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.quantized_formats.codes import integer_weight, of_signed
from eagleray.models.quantized_formats.scales import read_scales
from eagleray.models.quantized_formats.stored_format import FLOATS, MatrixPart, StoredTensors, check_groups

Strategy = Literal["tensor", "channel", "group", "block"]
"""The numbers that share a scale: all, those of an output, a group of an output's inputs, or a block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """The numbers of a weight that share a scale."""

    strategy: Strategy | None = None
    """None: the shape of the scales says whether it is the tensor or an output."""
    group_size: int | None = None
    """Inputs of a group."""
    block: tuple[int, int] | None = None
    """Rows and columns of a block."""

    def block_of(self, part: MatrixPart, tensors: StoredTensors, scales: str) -> tuple[int, int]:
        """Return the rows and columns that share a scale in a weight with these scales."""
        rows, columns = part.shape
        match self.strategy:
            case "tensor":
                return rows, columns
            case "channel":
                return 1, columns
            case "group":
                assert self.group_size is not None
                check_groups(part, self.group_size, scales, tensors)
                return 1, self.group_size
            case "block":
                assert self.block is not None
                return self.block
        name = part.name(scales)
        is_one = bool(tensors.kind(name)) and torch.Size(tensors.shape(name)).numel() == 1
        return (rows, columns) if is_one else (1, columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledFormat:
    """See `StoredFormat`."""

    method: str
    is_float: bool
    """Whether numbers are FP8 and not int8."""
    sharing: Sharing = Sharing()
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
