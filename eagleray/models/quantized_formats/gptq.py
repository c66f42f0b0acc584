"""GPTQ (arXiv 2210.17323), as AutoGPTQ and its successors store it: integers minus a zero point, times a scale.

A module has `qweight` int32 [inputs / p, outputs], where a word has p integers of consecutive inputs, `qzeros` int32
[groups, outputs / p], `scales` [groups, outputs] and `g_idx` int32 [inputs], the group of each input. If inputs are
ordered by activation (`desc_act`), groups are not consecutive, and the weight has groups of one column, which backends
decode.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.config.json_files import shown
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.config_file import ConfigFile
from eagleray.models.quantized_formats.codes import WORD_BITS, integer_weight, unpack_span, word_span
from eagleray.models.quantized_formats.stored_tensors import FLOATS, MatrixPart, StoredTensors, check_groups

LAYOUTS = {"gptq": 1, "gptq_v2": 0}
"""Numbers that are missing from the stored zero points of each layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqFormat:
    """See `StoredFormat`."""

    bits: int
    group_size: int | None
    """Inputs that share a scale; None: all."""
    is_symmetric: bool
    """Whether all zero points are the middle of the integers."""
    zero_shift: int
    """See `LAYOUTS`."""

    method = "gptq"
    weight_suffix = "qweight"
    weight_kinds = ("I32",)
    other_suffixes = ("qzeros", "scales", "g_idx")
    has_quantized_inputs = False

    @property
    def kept_as(self) -> WeightFormat:
        return WeightFormat(f"int{self.bits}")

    @property
    def numbers_per_word(self) -> int:
        return WORD_BITS // self.bits

    def read(self, part: MatrixPart, tensors: StoredTensors) -> GroupedWeight:
        rows, columns = part.shape
        size = self.group_size or columns
        check_groups(part, size, "qweight", tensors)
        outputs = slice(part.rows.start, part.rows.stop)
        shape = (-(-columns // self.numbers_per_word), rows)
        words = tensors.read(part.name("qweight"), ("I32",), shape, word_span(part.columns, self.bits), outputs)
        integers = unpack_span(words.t(), self.bits, part.columns)
        scales = tensors.read(part.name("scales"), FLOATS, (columns // size, rows), columns=outputs).t()
        zeros = self._zeros(part, columns // size, tensors)
        groups = self._groups(part, size, tensors)
        return integer_weight(integers, scales[:, groups], None if zeros is None else zeros[:, groups], self.bits)

    def _zeros(self, part: MatrixPart, num_groups: int, tensors: StoredTensors) -> Tensor | None:
        """Return the zero points [rows, groups], or None if they are the middle of the integers."""
        name, rows, middle = part.name("qzeros"), part.shape[0], 2 ** (self.bits - 1)
        shape = (num_groups, -(-rows * self.bits // WORD_BITS))
        words = tensors.read(name, ("I32",), shape, columns=word_span(part.rows, self.bits))
        # The sum wraps around, because 15 is what is stored of a zero point of 0.
        zeros = (unpack_span(words, self.bits, part.rows) + self.zero_shift) & (2**self.bits - 1)
        if not self.is_symmetric:
            return zeros.t()
        if not bool((zeros == middle).all()):
            tensors.fail(name, f"has zero points other than {middle}, but config.json says `sym`")
        return None

    def _groups(self, part: MatrixPart, size: int, tensors: StoredTensors) -> Tensor:
        """Return the stored groups of the part's groups."""
        name, (step, groups) = part.name("g_idx"), part.column_groups(size)
        if not tensors.kind(name):
            return groups
        own = tensors.read(name, ("I32",), part.shape[1:])[part.columns.start : part.columns.stop].long()
        if torch.equal(own, groups.repeat_interleave(step)):
            return groups
        if not bool(((own >= 0) & (own < part.shape[1] // size)).all()):
            tensors.fail(name, f"names groups beyond the {part.shape[1] // size} that the weight has")
        return own


def read_gptq(config: ConfigFile) -> GptqFormat:
    """Read a `quantization_config`. Raises `CheckpointError`."""
    if (bits := config.integer("bits", None)) not in (4, 8):
        config.fail(f"`bits` {bits} is not supported; supported are 4 and 8")
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if layout not in tuple(LAYOUTS) or config.get("is_marlin_format"):
        config.fail(f"`checkpoint_format` {shown(layout)} is not supported; supported are {', '.join(LAYOUTS)}")
    overrides = config.get("dynamic") or {}
    if not isinstance(overrides, dict) or any(fields for name, fields in overrides.items() if name[:2] != "-:"):
        config.fail("`dynamic` gives modules other formats, which is not supported; it may exclude modules only")
    return GptqFormat(
        bits=bits,
        group_size=None if config.get("group_size") == -1 else config.integer("group_size", None),
        is_symmetric=config.boolean("sym", False),
        zero_shift=LAYOUTS[layout],
    )
