"""The header of a GGUF file, by the reader of the `gguf` package, which is imported only here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from eagleray.config.json_files import shown
from eagleray.errors import CheckpointError

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""Types of tensors that are read."""
PLAIN_KINDS = ("F32", "F16", "BF16")
"""Types that are numbers, not blocks of quantized ones."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """The entry of a tensor."""

    kind: str
    shape: tuple[int, ...]
    """The contiguous dimension is the last one."""
    offset: int
    """Byte of the file at which the tensor begins."""


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """The fields and the tensors of one file, by their names in it."""

    path: Path
    fields: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """The prefix of the fields that describe the model."""
        return str(self.fields.get("general.architecture"))

    def fail(self, problem: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {problem}")

    def of_model(self, name: str, default: Any = None) -> Any:
        """Return a field that describes the model, by its name behind the architecture's."""
        return self.fields.get(f"{self.architecture}.{name}", default)

    def texts(self, name: str) -> list[str]:
        """Return a field that must be a list of texts."""
        value = self.fields.get(name)
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            self.fail(f"`{name}` must be a list of texts, but it is {shown(value)}")
        return value

    def numbers(self, name: str, count: int) -> list[Any]:
        """Return a field that must be a list of `count` numbers."""
        value = self.fields.get(name)
        if not isinstance(value, list) or len(value) != count or isinstance(value[0], str):
            self.fail(f"`{name}` must be a list of {count} numbers, but it is {shown(value)}")
        return value


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file. Raises `CheckpointError` if it is no complete one, or is one of several parts, or
    has tensors of a type that is not read."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {
            tensor.name: GgufTensor(
                tensor.tensor_type.name, tuple(reversed(tensor.shape.tolist())), int(tensor.data_offset)
            )
            for tensor in reader.tensors
        }
    except (ValueError, LookupError, OverflowError, OSError) as error:  # what the reader raises for wrong bytes
        raise CheckpointError(
            f"{path}: is not a complete GGUF file ({error}); it may be truncated or damaged: copy it again"
        ) from None
    header = GgufHeader(path, fields, tensors)
    if (num_parts := fields.get("split.count", 1)) > 1:
        header.fail(f"is one of {num_parts} parts of a model; merge them with `llama-gguf-split --merge`")
    for name, tensor in tensors.items():
        if tensor.kind not in KINDS:
            header.fail(f"tensor {name!r} is of the type {tensor.kind}; supported are {', '.join(KINDS)}")
    return header
