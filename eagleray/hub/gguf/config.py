"""The config.json and the generation_config.json that describe the model of a GGUF file."""

from __future__ import annotations

import re
from collections import Counter
from math import prod
from typing import Any

import numpy as np

from eagleray.config.json_files import shown
from eagleray.hub.gguf.header import GgufHeader
from eagleray.hub.gguf.rope import rope_scaling

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
"""The model's class by the name that GGUF has for it."""
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
DENSE_LAYER = re.compile(r"blk\.(\d+)\.ffn_gate\.weight")
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Field of the header below `general.sampling` → field of generation_config.json."""


def config_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of config.json. Their values are checked when the configuration is read.

    Raises `CheckpointError` for an architecture, or a variant of one, that is not supported.
    """
    if (architecture := header.architecture) not in ARCHITECTURES:
        header.fail(
            f"the architecture {shown(architecture)} is not supported; supported are {', '.join(ARCHITECTURES)}"
        )
    if EMBEDDING not in header.tensors:
        header.fail(f"tensor {EMBEDDING!r} is missing")
    num_heads = _uniform(header, "attention.head_count")
    head_dim = header.of_model("attention.key_length")
    if head_dim is None and isinstance(num_heads, int) and num_heads > 0:
        head_dim = header.of_model("embedding_length", 0) // num_heads
    _check_heads(header, head_dim)
    theta = _rounded(header.of_model("rope.freq_base", 10_000.0))
    fields = {
        "architectures": [ARCHITECTURES[architecture]],
        "dtype": _dtype(header),
        "vocab_size": header.tensors[EMBEDDING].shape[0],
        "hidden_size": header.of_model("embedding_length"),
        "intermediate_size": _uniform(header, "feed_forward_length"),
        "num_hidden_layers": header.of_model("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": _uniform(header, "attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": header.of_model("context_length"),
        "rms_norm_eps": _rounded(header.of_model("attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": rope_scaling(header, theta),
        "tie_word_embeddings": HEAD not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "bos_token_id": header.fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.fields.get("tokenizer.ggml.eos_token_id"),
    }
    fields |= _window(header) | _experts(header)
    required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "rms_norm_eps")
    for name in required:
        if fields[name] is None:
            header.fail(f"the header lacks the field of which `{name}` is made")
    return fields


def generation_fields(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of generation_config.json: the tokens that end an answer, and parameters of sampling."""
    names = ("eos", "eot", "eom")
    ends = [header.fields.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    found = list(dict.fromkeys(end for end in ends if end is not None))
    fields: dict[str, Any] = {"eos_token_id": found} if found else {}
    for theirs, ours in SAMPLING.items():
        if (value := header.fields.get(f"general.sampling.{theirs}")) is not None:
            fields[ours] = _rounded(value)
    return fields


def _experts(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of a mixture of experts; the architecture llama with experts is Mixtral."""
    if not (count := header.of_model("expert_count")):
        return {}
    if header.of_model("expert_shared_count", 0) or header.of_model("expert_weights_scale", 1.0) not in (0.0, 1.0):
        header.fail(f"{header.architecture} with shared experts or scaled weights of experts is not supported")
    fields = {"num_experts_per_tok": header.of_model("expert_used_count")}
    if header.architecture == "llama":
        return {**fields, "architectures": ["MixtralForCausalLM"], "num_local_experts": count}
    dense = (DENSE_LAYER.fullmatch(name) for name in header.tensors)
    fields |= {
        "num_experts": count,
        "moe_intermediate_size": header.of_model("expert_feed_forward_length"),
        "norm_topk_prob": bool(header.of_model("expert_weights_norm", True)),
        "mlp_only_layers": sorted(int(match[1]) for match in dense if match),
    }
    return fields


def _window(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of a sliding window, which makes a llama a Mistral."""
    window = header.of_model("attention.sliding_window", 0)
    if not window or window >= header.of_model("context_length", 0):
        return {}
    if header.architecture != "llama":
        header.fail(f"a sliding window of {window} positions is not supported for {header.architecture}")
    return {"architectures": ["MistralForCausalLM"], "sliding_window": window}


def _check_heads(header: GgufHeader, head_dim: Any) -> None:
    if (of_values := header.of_model("attention.value_length", head_dim)) != head_dim:
        header.fail(f"heads with {head_dim} features of keys and {of_values} of values are not supported")
    if (rotated := header.of_model("rope.dimension_count", head_dim)) != head_dim:
        header.fail(
            f"`rope.dimension_count` is {rotated}; only models that rotate the whole head of {head_dim} are served"
        )


def _uniform(header: GgufHeader, name: str) -> Any:
    """Return a field that may be a list of numbers for each layer, which must be alike."""
    value = header.of_model(name)
    if not isinstance(value, list):
        return value
    if len(set(value)) != 1:
        header.fail(f"`{name}` differs between layers, which is not supported")
    return value[0]


def _dtype(header: GgufHeader) -> str:
    """Return the dtype that most plain numbers have, or bfloat16 for a file with quantized weights."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors.values():
        if tensor.kind not in DTYPES:
            return "bfloat16"
        sizes[tensor.kind] += prod(tensor.shape)
    return DTYPES[sizes.most_common(1)[0][0]]


def _rounded(value: Any) -> Any:
    """Return a number of 32 bits as it is usually written: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
