"""GGUF files of small checkpoints, written by the `gguf` package as llama.cpp's converter does it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file
from tokenizers import Tokenizer

Array = npt.NDArray[Any]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
ENDS = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}
MODULES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{ours}": f"attn_{theirs}" for ours, theirs in {"o_proj": "output", "q_norm": "q_norm"}.items()},
    **{f"self_attn.{letter}_proj": f"attn_{letter}" for letter in "qkv"},
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
}
PROJECTIONS = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down", "w1": "gate", "w3": "up", "w2": "down"}


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: str,
    *,
    kinds: Mapping[str, str] | None = None,
    fields: Mapping[str, Any] | None = None,
    drop: tuple[str, ...] = (),
    extra: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """Write a checkpoint as a GGUF file whose matrices are of a type. Return the numbers that the file has, under the
    checkpoint's names.

    `kinds`: other types, by a part of the GGUF name. `fields`: fields of the header to add, or to change; None drops
    one. `drop`: GGUF names of tensors that are left out; `extra`: tensors of F32 to add.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    header = {**_fields(config, architecture), **_vocabulary(checkpoint), **(fields or {})}
    for name, value in header.items():
        _add(writer, name.replace("{arch}", architecture), value)
    numbers = {}
    for names, stored, weights in _tensors(checkpoint, config, architecture):
        if stored in drop:
            continue
        is_plain = weights[0].ndim == 1 or "ffn_gate_inp" in stored
        chosen = next((other for part, other in (kinds or {}).items() if part in stored), kind)
        data = quantize(np.stack(weights), "F32" if is_plain else chosen)
        for name, part in zip(names, data.numbers, strict=True):
            numbers[name] = _unpermuted(name, part, config, architecture)
        written = data.stored if "_exps" in stored else data.stored[0]
        writer.add_tensor(stored, written, raw_dtype=gguf.GGMLQuantizationType[data.kind])
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


class Quantized:
    """Numbers [..., columns] in a type: the bytes or numbers that a file has, and the numbers that they stand for."""

    def __init__(self, kind: str, stored: Array) -> None:
        self.kind = kind
        self.stored = stored
        dequantized = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
        self.numbers: Array = dequantized.astype(np.float32)


def quantize(numbers: Array, kind: str) -> Quantized:
    numbers = numbers.astype(np.float32)
    match kind:
        case "Q4_K":
            return Quantized(kind, _in_blocks(numbers, _q4_k))
        case "Q6_K":
            return Quantized(kind, _in_blocks(numbers, _q6_k))
        case _:
            return Quantized(kind, gguf.quants.quantize(numbers, gguf.GGMLQuantizationType[kind]))


def _in_blocks(numbers: Array, pack: Any) -> Array:
    return pack(numbers.reshape(-1, 256)).reshape(*numbers.shape[:-1], -1)


def _q4_k(blocks: Array) -> Array:
    """Return blocks of 256 numbers in Q4_K, whose sizes of steps and lowest numbers have 6 bits each."""
    groups = blocks.reshape(-1, 8, 32)
    lowest = np.minimum(groups.min(-1), 0)
    steps = (groups.max(-1) - lowest) / 15
    d, dmin = ((part.max(-1, keepdims=True) / 63).astype(np.float16) for part in (steps, -lowest))
    sc, m = (np.rint(part / np.maximum(scale, 1e-12)).clip(0, 63) for part, scale in ((steps, d), (-lowest, dmin)))
    offset, step = m * dmin.astype(np.float32), np.maximum(sc * d.astype(np.float32), 1e-12)
    codes = np.rint((groups + offset[..., None]) / step[..., None]).clip(0, 15).astype(np.uint8)
    sc, m = sc.astype(np.uint8), m.astype(np.uint8)
    packed = np.concatenate(
        (
            sc[:, :4] | (sc[:, 4:] >> 4 << 6),
            m[:, :4] | (m[:, 4:] >> 4 << 6),
            (sc[:, 4:] & 15) | (m[:, 4:] & 15) << 4,
        ),
        -1,
    )
    pairs = codes.reshape(-1, 4, 2, 32)
    nibbles = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return np.concatenate((d.view(np.uint8), dmin.view(np.uint8), packed, nibbles), -1)


def _q6_k(blocks: Array) -> Array:
    """Return blocks of 256 numbers in Q6_K: 6 bits each, in groups of 16 whose scale has a sign and 7 bits."""
    groups = blocks.reshape(-1, 16, 16)
    largest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
    scales = largest / -32
    d = (np.abs(scales).max(-1, keepdims=True) / 127).astype(np.float16)
    factors = np.rint(scales / np.maximum(d.astype(np.float32), 1e-12)).clip(-127, 127)
    step = factors * d.astype(np.float32)
    step = np.where(step == 0, 1e-12, step)[..., None]
    codes = (np.rint(groups / step).clip(-32, 31) + 32).astype(np.uint8).reshape(-1, 2, 4, 32)
    low = codes & 15
    halves = np.stack((low[:, :, 0] | low[:, :, 2] << 4, low[:, :, 1] | low[:, :, 3] << 4), 2)  # [blocks, 2, 2, 32]
    high = codes >> 4
    upper = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    parts = (halves.reshape(-1, 128), upper.reshape(-1, 64), factors.astype(np.int8).view(np.uint8), d.view(np.uint8))
    return np.concatenate(parts, -1)


def _fields(config: dict[str, Any], architecture: str) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config["rope_parameters"]
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": head_dim,
        "attention.sliding_window": config.get("sliding_window"),
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "rope.freq_base": float(rope["rope_theta"]),
        "rope.scaling.type": rope["rope_type"] if rope.get("rope_type") in ("linear", "yarn") else None,
        "rope.scaling.factor": rope.get("factor"),
        "rope.scaling.original_context_length": rope.get("original_max_position_embeddings"),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
    }
    return {f"{architecture}.{name}": number for name, number in numbers.items() if number is not None}


def _vocabulary(checkpoint: Path) -> dict[str, Any]:
    """Return the fields of the tokenizer beside a checkpoint, if there is one."""
    if not (checkpoint / "tokenizer.json").is_file():
        return {}
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    named = json.loads((checkpoint / "tokenizer_config.json").read_text())
    backend = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    size = json.loads((checkpoint / "config.json").read_text())["vocab_size"]
    special = {token["id"] for token in tokenizer["added_tokens"]}
    tokens = [backend.id_to_token(index) or f"[PAD{index}]" for index in range(size)]
    types = [3 if i in special else 5 if backend.id_to_token(i) is None else 1 for i in range(size)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2" if tokenizer["pre_tokenizer"]["type"] == "Sequence" else "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.eos_token_id": backend.token_to_id(named["eos_token"]),
        "tokenizer.ggml.padding_token_id": backend.token_to_id(named["pad_token"]),
        "tokenizer.chat_template": named["chat_template"],
    }


def _tensors(
    checkpoint: Path, config: dict[str, Any], architecture: str
) -> Iterator[tuple[list[str], str, list[Array]]]:
    """Yield the checkpoint's names, the GGUF name and the numbers of each tensor; the experts of a layer are one."""
    experts: dict[str, dict[int, tuple[str, Array]]] = {}
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        numbers = weight.float().numpy()
        kind = name.rpartition(".")[2]
        if not name.startswith("model.layers."):
            yield [name], f"{ENDS[name.split('.')[-2]]}.{kind}", [numbers]
            continue
        layer, module = name.split(".")[2], ".".join(name.split(".")[3:-1])
        if ".experts." in module:
            *_, index, projection = module.split(".")
            stored = f"blk.{layer}.ffn_{PROJECTIONS[projection]}_exps.{kind}"
            experts.setdefault(stored, {})[int(index)] = (name, numbers)
            continue
        stored = f"blk.{layer}.{MODULES[module]}.{kind}"
        yield [name], stored, [_permuted(name, numbers, config, architecture)]
    for stored, parts in experts.items():
        ordered = [parts[index] for index in range(len(parts))]
        yield [name for name, _ in ordered], stored, [numbers for _, numbers in ordered]


def _heads(name: str, config: dict[str, Any], architecture: str) -> int:
    if architecture != "llama":
        return 0
    if ".q_proj." in name:
        return int(config["num_attention_heads"])
    return int(config["num_key_value_heads"]) if ".k_proj." in name else 0


def _permuted(name: str, numbers: Array, config: dict[str, Any], architecture: str) -> Array:
    """Return the rows of queries and keys of a llama as GGUF has them: rotated pairs are neighbours."""
    if not (heads := _heads(name, config, architecture)):
        return numbers
    return numbers.reshape(heads, 2, len(numbers) // heads // 2, -1).swapaxes(1, 2).reshape(numbers.shape)


def _unpermuted(name: str, numbers: Array, config: dict[str, Any], architecture: str) -> Array:
    if not (heads := _heads(name, config, architecture)):
        return numbers
    return numbers.reshape(heads, len(numbers) // heads // 2, 2, -1).swapaxes(1, 2).reshape(numbers.shape)


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            pass
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
