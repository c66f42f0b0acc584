"""Stored integers as the codes of weights in groups. Pure."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.grouped import Encoding, GroupedWeight

WORD_BITS = 32


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the unsigned integers of `bits` bits, 4 or 8, in words int32 [rows, columns] as uint8 [rows, columns *
    32 / bits]. The lowest bits of a word are the first integer."""
    # not `contiguous`, which leaves empty tensors as they are
    integers = words.clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return integers if bits == 8 else torch.stack((integers & 15, integers >> 4), dim=-1).flatten(1)


def unpack_span(words: Tensor, bits: int, span: range) -> Tensor:
    """Return the integers `span` of rows, of which `words` has the `word_span`."""
    first = span.start % (WORD_BITS // bits)
    return unpack(words, bits)[:, first : first + len(span)]


def word_span(span: range, bits: int) -> slice:
    """Return the words that have these integers of a row."""
    per_word = WORD_BITS // bits
    return slice(span.start // per_word, -(-span.stop // per_word))


def of_signed(integers: Tensor) -> Tensor:
    """Return int8 numbers plus 128, as uint8."""
    return integers.view(torch.uint8) ^ 128


def integer_weight(integers: Tensor, scales: Tensor, zeros: Tensor | None, bits: int) -> GroupedWeight:
    """Return the weight of unsigned integers [rows, columns] minus `zeros`, times `scales`, both [rows, groups].

    Without `zeros`, these are the middle of the integers. The offsets of groups are exact in float32, of which the
    scales are then, too: offsets have no more bits than a scale and an integer together, if scales are stored in 16
    bits.
    """
    middle = 2 ** (bits - 1)
    if bits == 4 and zeros is None:
        return GroupedWeight(integers.contiguous(), scales.contiguous(), Encoding.INT4)
    scales = scales.float().contiguous()
    shift = torch.full_like(scales, middle) if zeros is None else zeros.float()
    if bits == 4:
        return GroupedWeight(integers.contiguous(), scales, Encoding.INT4, (middle - shift) * scales)
    codes = torch.where(integers >= middle, integers & (middle - 1), 255 - integers)
    return GroupedWeight(codes.contiguous(), scales, Encoding.HALF_INT8, (middle - 0.5 - shift) * scales)
