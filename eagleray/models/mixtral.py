"""Mixtral: experts in every layer, under tensor names of its own. A token's weights stay float32 until the sum over its
experts is done."""

from __future__ import annotations

from dataclasses import replace

from eagleray.kernels.params import RouterParams
from eagleray.models.base import Model, register
from eagleray.models.config_file import MAX_EXPERTS, ConfigFile
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.moe.experts import MoeBlock, fused_experts, gated_expert
from eagleray.models.part import ModelPart
from eagleray.models.spec import Defaults, ModelSpec, MoeSpec, read_common, uniform_windows
from eagleray.models.weights import Alias

MIXTRAL = Defaults(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    max_position_embeddings=4096 * 32,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
)


PROJECTIONS = ("w1", "w3", "w2")
"""Names of an expert's gate, up and down projection."""


@register("MixtralForCausalLM")
class Mixtral(Model):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        spec = read_common(config, "MixtralForCausalLM", MIXTRAL)
        return replace(
            spec,
            windows=uniform_windows(config, spec.num_layers, default=None),
            moe=MoeSpec(
                num_experts=(count := config.integer("num_local_experts", 8, maximum=MAX_EXPERTS)),
                router=RouterParams(
                    top_k=config.integer("num_experts_per_tok", 2, maximum=count), renormalize=True, round_weights=False
                ),
                intermediate_size=spec.intermediate_size,
                layers=(True,) * spec.num_layers,
            ),
        )

    def make_layer(self, index: int) -> DecoderLayer:
        name, part, layout = f"model.layers.{index}", self.part, self.experts
        assert layout is not None
        block = f"{name}.block_sparse_moe"
        expert = gated_expert(f"{block}.experts", part, layout, PROJECTIONS)
        attention = Attention(f"{name}.self_attn", part.spec.windows[index], part, layout.sequence_parallel)
        moe = MoeBlock(block, index, part, layout, expert=expert, aliases=_aliases(name, block, part))
        return DecoderLayer(name, attention, moe, part, layout.sequence_parallel)


def _aliases(name: str, block: str, part: ModelPart) -> list[Alias]:
    """Return the names that transformers 5 gives to the router and the experts of the layer `name`."""
    assert part.spec.moe is not None
    router = Alias(
        f"{name}.mlp.gate.weight",
        (part.spec.moe.num_experts, part.spec.hidden_size),
        lambda tensor: iter([(f"{block}.gate.weight", tensor)]),
    )
    return [router, *fused_experts(f"{name}.mlp.experts", f"{block}.experts", part, PROJECTIONS)]
