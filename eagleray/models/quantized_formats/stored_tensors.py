"""The tensors of a checkpoint as its format reads them, and the part of a matrix that a rank loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

FLOATS = ("F32", "F16", "BF16")
"""Dtypes that scales may be stored in."""

ALL = slice(None)


class StoredTensors(Protocol):
    """The tensors of a checkpoint."""

    def kind(self, name: str) -> str:
        """Return the dtype of a tensor in its file, or "" if it is missing."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor that is there."""
        ...

    def read(
        self, name: str, kinds: Sequence[str], shape: tuple[int, ...], rows: slice = ALL, columns: slice = ALL
    ) -> Tensor:
        """Read a tensor of one of these dtypes and of this shape, or a part of a matrix. Raises `CheckpointError`."""
        ...

    def fail(self, name: str, problem: str) -> NoReturn:
        """Raise a `CheckpointError` that names the file and the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class MatrixPart:
    """The rows and columns of a module's weight that a rank loads. Rows are outputs, columns are inputs."""

    module: str
    shape: tuple[int, int]
    """Shape of the whole weight."""
    rows: range
    columns: range

    def name(self, suffix: str) -> str:
        """Return the name of one of the module's tensors."""
        return f"{self.module}.{suffix}"

    def column_groups(self, size: int) -> tuple[int, Tensor]:
        """Return the size of groups that this part can be divided into, each of which lies in a stored group of `size`
        columns, and the numbers of these stored groups, int64."""
        first, end = self.columns.start, self.columns.stop
        is_one_group = first // size == (end - 1) // size
        step = end - first if is_one_group else math.gcd(size, first, end)
        return step, torch.arange(first, end, step) // size


def check_groups(part: MatrixPart, size: int, suffix: str, tensors: StoredTensors) -> None:
    """Fail unless groups of `size` divide the columns of a weight."""
    if part.shape[1] % size != 0:
        tensors.fail(
            part.name(suffix),
            f"belongs to a weight of {part.shape[1]} inputs, which the groups of `group_size` {size} do not divide",
        )
