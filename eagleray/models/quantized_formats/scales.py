"""Scales that a checkpoint has beside a weight of its shape: one for the weight, for each output, group or block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from eagleray.models.quantized_formats.stored_tensors import MatrixPart, StoredTensors, check_groups

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


def read_scales(
    part: MatrixPart, tensors: StoredTensors, name: str, kinds: tuple[str, ...], block: tuple[int, int]
) -> Tensor:
    """Read one number for each block of rows and columns: return [rows, groups] for the part's rows and
    `column_groups`. Dimensions of one element may be missing from the stored tensor."""
    high, wide = block
    rows, columns = (-(-size // step) for size, step in zip(part.shape, block, strict=True))
    shapes = [(rows, columns), *([(rows,)] if columns == 1 else []), *([()] if rows == columns == 1 else [])]
    found = tensors.shape(name) if tensors.kind(name) else ()
    stored = tensors.read(name, kinds, found if found in shapes else shapes[0]).reshape(rows, columns)
    of_rows = torch.arange(part.rows.start, part.rows.stop) // high
    _, groups = part.column_groups(wide)
    return stored[of_rows[:, None], groups]
