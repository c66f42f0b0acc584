"""Llama and Mistral: the plain decoder. Mistral adds a sliding window; Llama may have biases."""

from __future__ import annotations

from dataclasses import replace

from eagleray.models.base import register
from eagleray.models.config_file import ConfigFile
from eagleray.models.dense import DenseModel
from eagleray.models.spec import Defaults, ModelSpec, read_common, uniform_windows

LLAMA = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=None,
    max_position_embeddings=2048,
)
MISTRAL = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_position_embeddings=4096 * 32,
)


@register("LlamaForCausalLM")
class Llama(DenseModel):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        attention_bias = config.boolean("attention_bias", False)
        return replace(
            read_common(config, "LlamaForCausalLM", LLAMA),
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=config.boolean("mlp_bias", False),
        )


@register("MistralForCausalLM")
class Mistral(DenseModel):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        spec = read_common(config, "MistralForCausalLM", MISTRAL)
        return replace(spec, windows=uniform_windows(config, spec.num_layers, default=4096))
