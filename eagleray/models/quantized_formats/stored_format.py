"""The interface of the formats of quantized checkpoints."""

from __future__ import annotations

from typing import Protocol

from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.quantized_formats.stored_tensors import MatrixPart, StoredTensors


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
