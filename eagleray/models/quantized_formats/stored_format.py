"""The interface between formats of quantized checkpoints and the files that have their tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

import torch
from torch import Tensor

from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat

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


class StoredFormat(Protocol):
    """A format of quantized weights, as config.json describes it."""

    @property
    def method(self) -> str:
        """The field `quant_method`."""
        ...

    @property
    def kept_as(self) -> WeightFormat:
        """The format that a backend must keep, or else the weights are decoded."""
        ...

    @property
    def weight_suffix(self) -> str:
        """Name of the tensor that a module has if its weight is quantized, after the module's."""
        ...

    @property
    def weight_kinds(self) -> tuple[str, ...]:
        """Dtypes that this tensor is stored in. A tensor of another dtype is a weight that is not quantized."""
        ...

    @property
    def other_suffixes(self) -> tuple[str, ...]:
        """Names of further tensors of a quantized module."""
        ...

    @property
    def numbers_per_word(self) -> int:
        """Numbers that an integer of 32 bits stands for."""
        ...

    @property
    def has_quantized_inputs(self) -> bool:
        """Whether the checkpoint was made for activations of few bits, which are not quantized here."""
        ...

    def read(self, part: MatrixPart, tensors: StoredTensors) -> GroupedWeight:
        """Read a part of a quantized weight, without a change of any number. The encoding and the dtype of scales are
        the same for all weights of a checkpoint. Raises `CheckpointError`."""
        ...


def is_quantized(stored: StoredFormat, module: str, tensors: StoredTensors) -> bool:
    """Whether the checkpoint has the weight of a module in this format."""
    return tensors.kind(f"{module}.{stored.weight_suffix}") in stored.weight_kinds


def check_groups(part: MatrixPart, size: int, suffix: str, tensors: StoredTensors) -> None:
    """Fail unless groups of `size` divide the columns of a weight."""
    if part.shape[1] % size != 0:
        tensors.fail(
            part.name(suffix),
            f"belongs to a weight of {part.shape[1]} inputs, which the groups of `group_size` {size} do not divide",
        )
