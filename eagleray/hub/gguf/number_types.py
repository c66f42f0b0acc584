"""The types that GGUF has numbers for: those of values in a header, and those of tensors."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class ValueType(IntEnum):
    """The type of a value in the header."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type of tensors that is read."""

    number: int
    block_size: int
    """Numbers of a block; 1 for numbers that are not quantized."""
    block_bytes: int
    """Bytes of a block."""

    def num_bytes(self, count: int) -> int:
        """Return the bytes of `count` numbers, which must be whole blocks."""
        return count // self.block_size * self.block_bytes


TENSOR_TYPES = {
    "F32": TensorType(0, 1, 4),
    "F16": TensorType(1, 1, 2),
    "BF16": TensorType(30, 1, 2),
    "Q8_0": TensorType(8, 32, 34),
    "Q4_0": TensorType(2, 32, 18),
    "Q4_1": TensorType(3, 32, 20),
    "Q5_0": TensorType(6, 32, 22),
    "Q5_1": TensorType(7, 32, 24),
    "Q4_K": TensorType(12, 256, 144),
    "Q5_K": TensorType(13, 256, 176),
    "Q6_K": TensorType(14, 256, 210),
}
"""The types of tensors that are read, by their names."""

OTHER_TENSOR_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}
"""Names of types that are not read, for errors."""

TENSOR_TYPE_NAMES = {kind.number: name for name, kind in TENSOR_TYPES.items()} | OTHER_TENSOR_TYPES
