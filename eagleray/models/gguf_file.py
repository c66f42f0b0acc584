"""The tensors of a GGUF file, memory-mapped, under the names that they have in other checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from eagleray.config.json_files import read_json_object
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.gguf.number_types import TENSOR_TYPES
from eagleray.hub.needs import GGUF_FILE
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.gguf_blocks import FORMATS

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types of numbers that are not quantized."""

ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
PROJECTIONS = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
    "w1": "ffn_gate_exps",
    "w3": "ffn_up_exps",
    "w2": "ffn_down_exps",
}
"""The tensor of all experts' projections, by the name of one expert's."""
COMPUTED = frozenset({"rope_freqs.weight"})
"""Tensors that are no weights."""


class GgufName(NamedTuple):
    """The name of a tensor of a checkpoint in a GGUF file."""

    name: str
    expert: int | None = None
    """The expert whose part of the tensor this is."""


def find_name(name: str) -> GgufName:
    """Return the name in GGUF files of a tensor of a checkpoint. A tensor that GGUF files never have keeps its name."""
    if (match := LAYER.fullmatch(name)) is None:
        return GgufName(ENDS.get(name, name))
    layer, module, kind = match.groups()
    if (expert := EXPERT.fullmatch(module)) is not None and expert[2] in PROJECTIONS:
        return GgufName(f"blk.{layer}.{PROJECTIONS[expert[2]]}.{kind}", int(expert[1]))
    return GgufName(f"blk.{layer}.{MODULES[module]}.{kind}" if module in MODULES else name)


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of the file."""

    kind: str
    shape: tuple[int, ...]
    """The contiguous dimension is the last one."""
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.row_bytes * prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes along the last dimension."""
        return TENSOR_TYPES[self.kind].num_bytes(self.shape[-1])


class GgufFile:
    """The tensors of the file from whose header the files of a directory were made, see `hub.gguf.unpack`."""

    def __init__(self, path: Path, size: int, permuted_heads: Sequence[int] | None, entries: dict[str, Entry]) -> None:
        self.path = path
        self.entries = entries
        self._size = size
        self._permuted_heads = permuted_heads

    @classmethod
    def find(cls, directory: Path) -> GgufFile | None:
        """Return the file of a directory; None for one whose weights are not in a GGUF file."""
        if not (table := directory / GGUF_FILE).is_file():
            return None
        fields: dict[str, Any] = read_json_object(table)
        entries = {name: Entry(kind, tuple(shape), at) for name, (kind, shape, at) in fields["tensors"].items()}
        return cls(Path(fields["file"]), fields["size"], fields["permuted_heads"], entries)

    def check_plain(self) -> None:
        """Raise `ConfigError` if weights are quantized, and so cannot be quantized once more."""
        kinds = {entry.kind for entry in self.entries.values()} - PLAIN.keys()
        if kinds:
            found = ", ".join(sorted(kinds))
            raise ConfigError(f"option `quantization`: {self.path} has quantized weights already ({found}); drop it")

    def smallest_format(self, kept_formats: Set[WeightFormat]) -> WeightFormat | None:
        """Return the kept format of fewest bits that any weight is loaded in; None if all become plain numbers."""
        if WeightFormat.INT8 not in kept_formats:
            return None
        bits = {FORMATS[entry.kind].bits for entry in self.entries.values() if entry.kind in FORMATS}
        return (WeightFormat.INT4 if min(bits) == 4 else WeightFormat.INT8) if bits else None

    def headers(self) -> tuple[int, set[str]]:
        """Return what `checkpoint_files.read_headers` does: the number of parameters, and the names of tensors, where
        only the layer in them is as in other checkpoints."""
        names = {re.sub(r"^blk\.", "model.layers.", name) for name in self.entries}
        return sum(prod(entry.shape) for entry in self.entries.values()), names

    def map(self) -> Tensor:
        """Return the bytes of the file. They must not be written to. Raises `CheckpointError` if the file is missing or
        another one than that of the header."""
        try:
            size = self.path.stat().st_size
            if size != self._size:
                raise CheckpointError(
                    f"{self.path}: has {size:,} bytes, but had {self._size:,} when its header was read"
                )
            return torch.from_numpy(np.memmap(self.path, mode="c"))  # torch warns of memory that cannot be written
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None

    def rows(self, name: str, span: range) -> slice | Tensor:
        """Return the rows of the stored tensor that are the rows `span` of a tensor of a checkpoint.

        In a file of a llama, features of queries and keys that are rotated together are neighbours; in a checkpoint
        they are half a head apart.
        """
        which = {"q_proj": 0, "k_proj": 1}.get(name.rsplit(".", 2)[-2])
        if self._permuted_heads is None or which is None:
            return slice(span.start, span.stop)
        size = self.entries[find_name(name).name].shape[0]
        half = size // self._permuted_heads[which] // 2
        rows = torch.arange(span.start, span.stop)
        head, feature = rows // (2 * half), rows % (2 * half)
        return head * 2 * half + feature % half * 2 + feature // half

    def left_over(self, names: Iterable[str]) -> list[str]:
        """Return the tensors of the file that are not the places of `names`."""
        return sorted(self.entries.keys() - {find_name(name).name for name in names} - COMPUTED)
