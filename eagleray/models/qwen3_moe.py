"""Qwen3-MoE: Qwen3 with experts in the layers that the configuration picks; one window for all layers."""

from __future__ import annotations

from dataclasses import replace

from eagleray.config.json_files import shown
from eagleray.kernels.params import RouterParams
from eagleray.models.base import Model, register
from eagleray.models.config_file import MAX_EXPERTS, ConfigFile
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.mlp import MLP
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.spec import Defaults, ModelSpec, MoeSpec, read_common, uniform_windows

QWEN3_MOE = Defaults(
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=24,
    num_heads=32,
    num_kv_heads=4,
    max_position_embeddings=32768,
)


@register("Qwen3MoeForCausalLM")
class Qwen3Moe(Model):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        spec = read_common(config, "Qwen3MoeForCausalLM", QWEN3_MOE)
        attention_bias = config.boolean("attention_bias", False)
        if config.boolean("use_sliding_window", False):
            spec = replace(spec, windows=uniform_windows(config, spec.num_layers, default=4096))
        return replace(
            spec,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            qk_norm=True,
            moe=MoeSpec(
                num_experts=(count := _num_experts(config)),
                router=RouterParams(
                    top_k=config.integer("num_experts_per_tok", 8, maximum=count),
                    renormalize=config.boolean("norm_topk_prob", False),
                    round_weights=True,
                ),
                intermediate_size=config.integer("moe_intermediate_size", 768),
                layers=_moe_layers(config, spec.num_layers),
            ),
        )

    def make_layer(self, index: int) -> DecoderLayer:
        name, part, layout = f"model.layers.{index}", self.part, self.experts
        assert layout is not None and part.spec.moe is not None
        window = part.spec.windows[index]
        if not part.spec.moe.layers[index]:
            attention = Attention(f"{name}.self_attn", window, part)
            return DecoderLayer(name, attention, MLP(f"{name}.mlp", part), part)
        attention = Attention(f"{name}.self_attn", window, part, layout.sequence_parallel)
        moe = MoeBlock(f"{name}.mlp", index, part, layout)
        return DecoderLayer(name, attention, moe, part, layout.sequence_parallel)


def _num_experts(config: ConfigFile) -> int:
    """Read the number of experts, whose field has different names in different versions of transformers."""
    default = config.optional_integer("num_local_experts", 128, maximum=MAX_EXPERTS)
    return config.integer("num_experts", default, maximum=MAX_EXPERTS)


def _moe_layers(config: ConfigFile, num_layers: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(layer) is not int for layer in dense):
        config.fail(f"`mlp_only_layers` must be a list of layer numbers, but it is {shown(dense)}")
    dense = set(dense)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
