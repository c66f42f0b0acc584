"""Low-rank adapters of random numbers for a model of some shape."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagleray.models.spec import ModelSpec


def write_adapter(directory: Path, spec: ModelSpec, rank: int) -> Path:
    """Write an adapter of every projection of a dense model, in PEFT's format."""
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    tensors = {}
    for layer in range(spec.num_layers):
        for name, (outputs, inputs) in shapes.items():
            module = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{module}.lora_A.weight"] = 0.02 * torch.randn(rank, inputs, dtype=torch.bfloat16)
            tensors[f"{module}.lora_B.weight"] = 0.02 * torch.randn(outputs, rank, dtype=torch.bfloat16)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "init_lora_weights": True}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
