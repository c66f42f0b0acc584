"""Qwen3: queries and keys are normalized, each head by itself."""

from __future__ import annotations

from dataclasses import replace

from eagleray.models.base import register
from eagleray.models.config_file import ConfigFile
from eagleray.models.dense import DenseModel
from eagleray.models.spec import Defaults, ModelSpec, read_common, windows_by_layer

QWEN3 = Defaults(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=22016,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position_embeddings=32768,
)


@register("Qwen3ForCausalLM")
class Qwen3(DenseModel):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        spec = read_common(config, "Qwen3ForCausalLM", QWEN3)
        attention_bias = config.boolean("attention_bias", False)
        return replace(
            spec,
            windows=windows_by_layer(config, spec.num_layers),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
        )
