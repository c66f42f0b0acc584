"""Conversion of a checkpoint of `shapes.py` to GGUF for llama.cpp: the same weights in bf16, norms in float32.

python benchmarks/gguf_file.py CHECKPOINT FILE.gguf
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

ALIGNMENT = 32
UINT32, FLOAT32, STRING, ARRAY, INT32 = 4, 6, 8, 9, 5
F32, BF16 = 0, 30
"""Numbers of the tensor types in the format; the line above has those of value types."""
ARCHITECTURES = {"qwen3": "qwen3", "qwen3_moe": "qwen3moe"}
ENDS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
}
PARTS = {
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
}
EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}
NORMAL_TOKEN, CONTROL_TOKEN, UNUSED_TOKEN = 1, 3, 5


class GgufTensor(NamedTuple):
    name: str
    kind: int
    data: np.ndarray
    """Array of uint16 (the bits of bf16) or float32."""


def convert(checkpoint: Path, file: Path) -> None:
    """Write `file` under another name and rename it, so that a file of this name is always complete."""
    config = json.loads((checkpoint / "config.json").read_text())
    tensors = list(_tensors(checkpoint, config))
    unfinished = file.with_suffix(".unfinished")
    with unfinished.open("wb") as out:
        values = list(_values(checkpoint, config))
        out.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)))
        for name, kind, value in values:
            out.write(_string(name) + struct.pack("<I", kind) + _encode(kind, value))
        offset = 0
        for tensor in tensors:
            shape = tensor.data.shape[::-1]  # the contiguous dimension comes first
            out.write(_string(tensor.name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape))
            out.write(struct.pack("<IQ", tensor.kind, offset))
            offset += -(-tensor.data.nbytes // ALIGNMENT) * ALIGNMENT
        for tensor in tensors:
            _pad(out)
            out.write(np.ascontiguousarray(tensor.data).data)
        _pad(out)
    unfinished.rename(file)


def _values(checkpoint: Path, config: dict[str, Any]) -> Iterator[tuple[str, int, Any]]:
    architecture = ARCHITECTURES[config["model_type"]]
    yield "general.architecture", STRING, architecture
    yield "general.name", STRING, checkpoint.name
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
        yield f"{architecture}.{name}", UINT32, number
    theta = config.get("rope_theta") or config.get("rope_parameters", {}).get("rope_theta", 10_000.0)
    yield f"{architecture}.rope.freq_base", FLOAT32, theta
    yield f"{architecture}.attention.layer_norm_rms_epsilon", FLOAT32, config["rms_norm_eps"]
    yield from _vocabulary(checkpoint, config["vocab_size"])


def _vocabulary(checkpoint: Path, vocab_size: int) -> Iterator[tuple[str, int, Any]]:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    known = {token_id: token for token, token_id in tokenizer["model"]["vocab"].items()}
    known |= {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    kinds = [
        CONTROL_TOKEN if token_id in special else NORMAL_TOKEN if token_id in known else UNUSED_TOKEN
        for token_id in range(vocab_size)
    ]
    yield "tokenizer.ggml.model", STRING, "gpt2"
    yield "tokenizer.ggml.pre", STRING, "gpt-2"
    yield "tokenizer.ggml.tokens", ARRAY, (STRING, [known.get(i, f"[UNUSED{i}]") for i in range(vocab_size)])
    yield "tokenizer.ggml.token_type", ARRAY, (INT32, kinds)
    yield "tokenizer.ggml.merges", ARRAY, (STRING, merges)
    yield "tokenizer.ggml.eos_token_id", UINT32, 0


def _tensors(checkpoint: Path, config: dict[str, Any]) -> Iterator[GgufTensor]:
    weights = _weights(checkpoint / "model.safetensors")
    for layer in [None, *range(config["num_hidden_layers"])]:
        names = ENDS if layer is None else {f"model.layers.{layer}.{a}.weight": b for a, b in PARTS.items()}
        for ours, theirs in names.items():
            if ours in weights:
                yield _tensor(theirs if layer is None else f"blk.{layer}.{theirs}.weight", weights[ours])
        experts = f"model.layers.{layer}.mlp.experts"
        if f"{experts}.0.up_proj.weight" in weights:
            for ours, theirs in EXPERTS.items():
                each = [weights[f"{experts}.{index}.{ours}.weight"] for index in range(_num_experts(config))]
                yield _tensor(f"blk.{layer}.{theirs}.weight", np.stack(each))


def _tensor(name: str, bits: np.ndarray) -> GgufTensor:
    """Make a tensor from the bits of bf16. llama.cpp wants vectors (norms) and routers in float32."""
    if bits.ndim == 1 or "ffn_gate_inp" in name:
        return GgufTensor(name, F32, (bits.astype(np.uint32) << 16).view(np.float32))
    return GgufTensor(name, BF16, bits)


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


def _encode(kind: int, value: Any) -> bytes:
    if kind == ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_encode(of, item) for item in items)
    if kind == STRING:
        return _string(value)
    return struct.pack({UINT32: "<I", INT32: "<i", FLOAT32: "<f"}[kind], value)


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pad(out: BinaryIO) -> None:
    out.write(bytes(-out.tell() % ALIGNMENT))


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
