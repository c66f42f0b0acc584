"""Conversion of a checkpoint of `shapes.py` to GGUF for llama.cpp: the same weights in bf16, norms in float32.

python benchmarks/gguf_file.py CHECKPOINT FILE.gguf
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from eagleray.hub.gguf.header import DEFAULT_ALIGNMENT, MAGIC, VERSIONS
from eagleray.hub.gguf.number_types import TENSOR_TYPES, ValueType
from eagleray.hub.gguf.tokenizer import TokenType
from eagleray.models.gguf_file import find_name

ARCHITECTURES = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
FORMATS = {ValueType.UINT32: "<I", ValueType.INT32: "<i", ValueType.FLOAT32: "<f"}


class GgufTensor(NamedTuple):
    name: str
    kind: str
    """The name of its type."""
    data: np.ndarray
    """Array of uint16 (the bits of bf16) or float32."""


def convert(checkpoint: Path, file: Path) -> None:
    """Write `file` under another name and rename it, so that a file of this name is always complete."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = list(_tensors(checkpoint))
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as out:
        values = list(_values(checkpoint, config))
        out.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(tensors), len(values)))
        for name, kind, value in values:
            out.write(_string(name) + struct.pack("<I", kind) + _encode(kind, value))
        offset = 0
        for tensor in tensors:
            shape = tensor.data.shape[::-1]  # the contiguous dimension comes first
            out.write(_string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            out.write(struct.pack("<IQ", TENSOR_TYPES[tensor.kind].number, offset))
            offset += -(-tensor.data.nbytes // DEFAULT_ALIGNMENT) * DEFAULT_ALIGNMENT
        for tensor in tensors:
            _pad(out)
            out.write(np.ascontiguousarray(tensor.data).data)
        _pad(out)
    unfinished.rename(file)


def quantize_by_llama(python: str, source: Path, target: Path, kind: str) -> None:
    """Quantize a file in bf16 to one of llama.cpp's formats. python: one that has llama-cpp-python."""
    script = Path(__file__).with_name("quantize_llama.py")
    subprocess.run([python, script, source, target, kind], check=True)


def _values(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, ValueType, Any]]:
    architecture = ARCHITECTURES[config["model_type"]]
    yield "general.architecture", ValueType.STRING, architecture
    yield "general.name", ValueType.STRING, checkpoint.name
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
    }
    if architecture == "qwen3moe":
        numbers["expert_count"] = _num_experts(config)
        numbers["expert_used_count"] = config["num_experts_per_tok"]
        numbers["expert_feed_forward_length"] = config["moe_intermediate_size"]
    for name, number in numbers.items():
        yield f"{architecture}.{name}", ValueType.UINT32, number
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    yield f"{architecture}.rope.freq_base", ValueType.FLOAT32, theta
    yield f"{architecture}.attention.layer_norm_rms_epsilon", ValueType.FLOAT32, config["rms_norm_eps"]
    yield from _vocabulary(checkpoint, config["vocab_size"])


def _vocabulary(checkpoint: Path, vocab_size: int) -> Iterator[tuple[str, ValueType, Any]]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    known = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    known |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    kinds = [
        TokenType.CONTROL if token_id in special else TokenType.NORMAL if token_id in known else TokenType.UNUSED
        for token_id in range(vocab_size)
    ]
    yield "tokenizer.ggml.model", ValueType.STRING, "gpt2"
    yield "tokenizer.ggml.pre", ValueType.STRING, "gpt-2"
    yield (
        "tokenizer.ggml.tokens",
        ValueType.ARRAY,
        (ValueType.STRING, [known.get(i, f"[UNUSED{i}]") for i in range(vocab_size)]),
    )
    yield "tokenizer.ggml.token_type", ValueType.ARRAY, (ValueType.INT32, kinds)
    yield "tokenizer.ggml.merges", ValueType.ARRAY, (ValueType.STRING, merges)
    yield "tokenizer.ggml.eos_token_id", ValueType.UINT32, 0


def _tensors(checkpoint: Path) -> Iterator[GgufTensor]:
    weights = _weights(checkpoint / "model.safetensors")
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, bits in weights.items():
        place = find_name(name)
        assert place.name != name, f"GGUF files have no tensor for {name}"
        if place.expert is None:
            yield _tensor(place.name, bits)
        else:
            experts.setdefault(place.name, {})[place.expert] = bits
    for name, parts in experts.items():
        yield _tensor(name, np.stack([parts[index] for index in range(len(parts))]))


def _tensor(name: str, bits: np.ndarray) -> GgufTensor:
    """Make a tensor from the bits of bf16. llama.cpp wants vectors (norms) and routers in float32."""
    if bits.ndim == 1 or "ffn_gate_inp" in name:
        return GgufTensor(name, "F32", (bits.astype(np.uint32) << 16).view(np.float32))
    return GgufTensor(name, "BF16", bits)


def _weights(path: Path) -> dict[str, np.ndarray]:
    """Map the bits of every tensor, all of which are bf16."""
    with path.open("rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
    data = np.memmap(path, np.uint8, "r", offset=8 + size)
    weights = {}
    for name, entry in header.items():
        if name != "__metadata__":
            assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
            begin, end = entry["data_offsets"]
            weights[name] = data[begin:end].view(np.uint16).reshape(entry["shape"])
    return weights


def _num_experts(config: dict[str, Any]) -> int:
    return config.get("num_experts") or config["num_local_experts"]


def _encode(kind: ValueType, value: Any) -> bytes:
    if kind == ValueType.ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_encode(of, item) for item in items)
    if kind == ValueType.STRING:
        return _string(value)
    return struct.pack(FORMATS[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % DEFAULT_ALIGNMENT))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
