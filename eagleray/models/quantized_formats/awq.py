"""AWQ (arXiv 2306.00978), version gemm of AutoAWQ: integers of four bits minus a zero point, times a scale.

A module has `qweight` int32 [inputs, outputs / 8], `qzeros` int32 [groups, outputs / 8] and `scales` [groups, outputs].
A word has the integers of eight consecutive outputs in the order `ORDER`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.config.json_files import shown
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.config_file import ConfigFile
from eagleray.models.quantized_formats.codes import WORD_BITS, integer_weight, unpack, word_span
from eagleray.models.quantized_formats.stored_tensors import FLOATS, MatrixPart, StoredTensors, check_groups

BITS = 4
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Outputs of the integers of a word, the lowest bits first."""
PLACES = torch.tensor(ORDER).argsort()
"""The place of each output in a word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AwqFormat:
    """See `StoredFormat`."""

    group_size: int | None
    """Inputs that share a scale; None: all."""

    method = "awq"
    kept_as = WeightFormat.INT4
    weight_suffix = "qweight"
    weight_kinds = ("I32",)
    other_suffixes = ("qzeros", "scales")
    numbers_per_word = WORD_BITS // BITS
    has_quantized_inputs = False

    def read(self, part: MatrixPart, tensors: StoredTensors) -> GroupedWeight:
        rows, columns = part.shape
        size = self.group_size or columns
        check_groups(part, size, "qweight", tensors)
        inputs, outputs = (slice(span.start, span.stop) for span in (part.columns, part.rows))
        num_groups, num_words = columns // size, -(-rows // self.numbers_per_word)
        span = word_span(part.rows, BITS)
        integers = tensors.read(part.name("qweight"), ("I32",), (columns, num_words), inputs, span)
        zeros = tensors.read(part.name("qzeros"), ("I32",), (num_groups, num_words), columns=span)
        scales = tensors.read(part.name("scales"), FLOATS, (num_groups, rows), columns=outputs)
        _, groups = part.column_groups(size)
        own = _outputs(zeros, part.rows)[groups].t()
        return integer_weight(_outputs(integers, part.rows).t(), scales[groups].t(), own, BITS)


def _outputs(words: Tensor, outputs: range) -> Tensor:
    """Return the integers of these outputs, [..., outputs]."""
    in_order = unpack(words, BITS).unflatten(1, (-1, len(ORDER)))[:, :, PLACES].flatten(1)
    first = outputs.start % len(ORDER)
    return in_order[:, first : first + len(outputs)]


def read_awq(config: ConfigFile) -> AwqFormat:
    """Read a `quantization_config`. Raises `CheckpointError`."""
    if (bits := config.integer("bits", config.integer("w_bit", BITS))) != BITS:
        config.fail(f"`bits` {bits} is not supported for awq; supported is {BITS}")
    version = config.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        config.fail(f"`version` {shown(version)} is not supported for awq; supported is gemm")
    if not config.boolean("zero_point", True):
        config.fail("`zero_point` false is not supported for awq; supported are weights with zero points")
    name = "q_group_size" if config.get("q_group_size") is not None else "group_size"
    return AwqFormat(group_size=None if config.get(name) == -1 else config.integer(name, 128))
