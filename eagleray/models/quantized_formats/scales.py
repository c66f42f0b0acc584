"""Scales that a checkpoint has beside a weight of its shape: one for the weight, for each output, group or block."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.models.quantized_formats.stored_format import MatrixPart, StoredTensors


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
