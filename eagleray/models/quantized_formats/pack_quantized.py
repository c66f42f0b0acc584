"""The format pack-quantized of compressed-tensors: integers of 4 or 8 bits in words, and activations of 16 bits.

A module has `weight_packed` int32 [outputs, inputs / p], where a word has p integers plus the middle of their range,
`weight_shape`, the `weight_scale` of groups, outputs or the tensor, and `weight_zero_point` int32 [outputs / p, groups]
unless zero points are zero. `weight_g_idx` is the group of each input if inputs were ordered by activation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.quantized_formats.codes import WORD_BITS, integer_weight, of_signed, unpack_span, word_span
from eagleray.models.quantized_formats.scales import Sharing, read_scales
from eagleray.models.quantized_formats.stored_tensors import FLOATS, MatrixPart, StoredTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantizedFormat:
    """See `StoredFormat`."""

    bits: int
    sharing: Sharing
    is_symmetric: bool
    """Whether there are no zero points."""

    method = "compressed-tensors"
    weight_suffix = "weight_packed"
    weight_kinds = ("I32",)
    other_suffixes = ("weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
    has_quantized_inputs = False

    @property
    def kept_as(self) -> WeightFormat:
        return WeightFormat(f"int{self.bits}")

    @property
    def numbers_per_word(self) -> int:
        return WORD_BITS // self.bits

    def read(self, part: MatrixPart, tensors: StoredTensors) -> GroupedWeight:
        rows, columns = part.shape
        block = self.sharing.block_of(part, tensors, "weight_scale")
        self._check(part, block[1], tensors)
        shape = (rows, -(-columns * self.bits // WORD_BITS))
        own_rows, words = slice(part.rows.start, part.rows.stop), word_span(part.columns, self.bits)
        packed = tensors.read(part.name("weight_packed"), ("I32",), shape, own_rows, words)
        integers = unpack_span(packed, self.bits, part.columns)
        scales = read_scales(part, tensors, part.name("weight_scale"), FLOATS, block)
        return integer_weight(integers, scales, self._zeros(part, block, tensors), self.bits)

    def _zeros(self, part: MatrixPart, block: tuple[int, int], tensors: StoredTensors) -> Tensor | None:
        """Return the zero points [rows, groups], or None if they are the middle of the integers."""
        if self.is_symmetric:
            return None
        name = part.name("weight_zero_point")
        if tensors.kind(name) == "I8":  # those of whole tensors are not packed, nor are those of old files
            signed = read_scales(part, tensors, name, ("I8",), block)
            return of_signed(signed) - (128 - 2 ** (self.bits - 1))
        (rows, columns), (_, groups) = part.shape, part.column_groups(block[1])
        shape = (-(-rows * self.bits // WORD_BITS), columns // block[1])
        words = tensors.read(name, ("I32",), shape, word_span(part.rows, self.bits))
        return unpack_span(words.t(), self.bits, part.rows).t()[:, groups]

    def _check(self, part: MatrixPart, size: int, tensors: StoredTensors) -> None:
        """Fail if the stored shape is another one, or if groups of `size` inputs are not consecutive."""
        if tensors.kind(name := part.name("weight_shape")):
            stored = tuple(tensors.read(name, ("I64", "I32"), (2,)).tolist())
            if stored != part.shape:
                tensors.fail(
                    name, f"says that the weight is {list(stored)}, but config.json implies {list(part.shape)}"
                )
        if tensors.kind(name := part.name("weight_g_idx")):
            order = tensors.read(name, ("I32",), part.shape[1:])
            if not torch.equal(order.long(), torch.arange(part.shape[1]) // size):
                tensors.fail(
                    name, "orders the inputs of groups by activation (`actorder` group), which is not supported"
                )
