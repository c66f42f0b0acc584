"""Qwen2: biases on queries, keys and values, and optionally sliding windows in the upper layers."""

from __future__ import annotations

from dataclasses import replace

from eagleray.models.base import register
from eagleray.models.config_file import ConfigFile
from eagleray.models.dense import DenseModel
from eagleray.models.spec import Defaults, ModelSpec, read_common, windows_by_layer

QWEN2 = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    max_position_embeddings=32768,
)


@register("Qwen2ForCausalLM")
class Qwen2(DenseModel):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        spec = read_common(config, "Qwen2ForCausalLM", QWEN2)
        return replace(spec, windows=windows_by_layer(config, spec.num_layers), qkv_bias=True)
