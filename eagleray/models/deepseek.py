"""DeepSeek-V2 and DeepSeek-V3: multi-head latent attention; routed and shared experts in all layers but the first ones,
which are dense. The two differ in the choice of a token's experts."""

from __future__ import annotations

from dataclasses import replace

from eagleray.config.json_files import shown
from eagleray.kernels.params import RouterParams
from eagleray.models.base import Model, register
from eagleray.models.config_file import MAX_EXPERTS, MAX_LAYERS, ConfigFile
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.layer import WeightGroup
from eagleray.models.layers.mla import MLAAttention
from eagleray.models.layers.mlp import MLP
from eagleray.models.moe.experts import MoeBlock, SharedExperts
from eagleray.models.option_checks import DRAFT_LAYERS_FIELD
from eagleray.models.rope_config import check_head_dim, softmax_factor
from eagleray.models.spec import Defaults, MLASpec, ModelSpec, MoeSpec, read_common
from eagleray.models.weights import Param

DEEPSEEK_V2 = Defaults(
    vocab_size=102400,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=None,
    head_dim=64,
    max_position_embeddings=2048,
)
DEEPSEEK_V3 = Defaults(
    vocab_size=129280,
    hidden_size=7168,
    intermediate_size=18432,
    num_layers=61,
    num_heads=128,
    num_kv_heads=None,
    head_dim=64,
    max_position_embeddings=4096,
)


class DeepSeek(Model):
    """The layers of both families."""

    def make_layer(self, index: int) -> DecoderLayer:
        name, part, layout = f"model.layers.{index}", self.part, self.experts
        assert layout is not None and part.spec.moe is not None
        if not part.spec.moe.layers[index]:
            return DecoderLayer(name, MLAAttention(f"{name}.self_attn", part), MLP(f"{name}.mlp", part), part)
        has_shared = part.spec.moe.shared_intermediate_size > 0
        shared = SharedExperts(f"{name}.mlp.shared_experts", part, layout) if has_shared else None
        moe = MoeBlock(f"{name}.mlp", index, part, layout, router=_router(f"{name}.mlp.gate", part.spec), shared=shared)
        attention = MLAAttention(f"{name}.self_attn", part, layout.sequence_parallel)
        return DecoderLayer(name, attention, moe, part, layout.sequence_parallel)


@register("DeepseekV2ForCausalLM")
class DeepSeekV2(DeepSeek):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        _expect(config, "scoring_func", "softmax")
        if config.boolean("norm_topk_prob", False):
            config.fail(
                "`norm_topk_prob` is true, which is not supported for DeepseekV2ForCausalLM: implementations disagree "
                "on its meaning there"
            )
        method = config.get("topk_method") or "greedy"
        if method not in ("greedy", "group_limited_greedy"):
            config.fail(
                f"`topk_method` {shown(method)} is not supported; supported are greedy and group_limited_greedy"
            )
        is_grouped = method == "group_limited_greedy"
        moe = MoeSpec(
            num_experts=config.integer("n_routed_experts", 64, maximum=MAX_EXPERTS),
            router=RouterParams(
                top_k=config.integer("num_experts_per_tok", None),
                renormalize=False,
                round_weights=False,
                num_groups=config.integer("n_group", None) if is_grouped else 1,
                top_groups=config.integer("topk_group", None) if is_grouped else 1,
                scale=config.number("routed_scaling_factor", 1.0),
            ),
            intermediate_size=(size := config.integer("moe_intermediate_size", 1407)),
            layers=(),
            shared_intermediate_size=size * _num_shared(config, 2),
        )
        spec = _read(config, "DeepseekV2ForCausalLM", DEEPSEEK_V2, moe, is_interleaved=True, first_moe_layer=0)
        return replace(spec, mlp_bias=config.boolean("mlp_bias", False))


@register("DeepseekV3ForCausalLM")
class DeepSeekV3(DeepSeek):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        _expect(config, "scoring_func", "sigmoid")
        _expect(config, "topk_method", "noaux_tc")
        moe = MoeSpec(
            num_experts=config.integer("n_routed_experts", 256, maximum=MAX_EXPERTS),
            router=RouterParams(
                top_k=config.integer("num_experts_per_tok", 8),
                renormalize=config.boolean("norm_topk_prob", True),
                round_weights=False,
                renormalize_eps=1e-20,
                scoring="sigmoid",
                num_groups=config.integer("n_group", 8),
                top_groups=config.integer("topk_group", 4),
                group_score="top2",
                scale=config.number("routed_scaling_factor", 2.5),
            ),
            intermediate_size=(size := config.integer("moe_intermediate_size", 2048)),
            layers=(),
            has_correction_bias=True,
            shared_intermediate_size=size * _num_shared(config, 1),
        )
        is_interleaved = config.boolean("rope_interleave", True)
        spec = _read(
            config, "DeepseekV3ForCausalLM", DEEPSEEK_V3, moe, is_interleaved=is_interleaved, first_moe_layer=3
        )
        return replace(spec, num_draft_layers=config.integer(DRAFT_LAYERS_FIELD, 1, minimum=0, maximum=MAX_LAYERS))


def _router(name: str, spec: ModelSpec) -> WeightGroup:
    """Declare the router. Its products, and the weights that it gives to experts, are float32 whatever the model's
    dtype is."""
    assert spec.moe is not None
    weight = Param(f"{name}.weight", (spec.moe.num_experts, spec.hidden_size))
    return WeightGroup([weight], lambda weights, kernels: kernels.exact_linear(weights.load(weight)))


def _read(
    config: ConfigFile,
    architecture: str,
    defaults: Defaults,
    moe: MoeSpec,
    *,
    is_interleaved: bool,
    first_moe_layer: int,
) -> ModelSpec:
    """Read the common fields of both families. `moe` comes without its layers; `first_moe_layer` is the default for the
    first layer with experts."""
    if config.integer("moe_layer_freq", 1) != 1:
        config.fail(
            f"`moe_layer_freq` {shown(config.get('moe_layer_freq'))} is not supported; supported is 1, experts in "
            "every layer from `first_k_dense_replace` on"
        )
    _check_expert_counts(config, moe)
    spec = read_common(config, architecture, defaults)
    first = config.integer("first_k_dense_replace", first_moe_layer, minimum=0)
    mla = _read_mla(config, spec, is_interleaved=is_interleaved)
    attention_bias = config.boolean("attention_bias", False)
    return replace(
        spec,
        num_kv_heads=1,
        head_dim=mla.qk_rope_head_dim,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mla=mla,
        moe=replace(moe, layers=tuple(layer >= first for layer in range(spec.num_layers))),
    )


def _read_mla(config: ConfigFile, spec: ModelSpec, *, is_interleaved: bool) -> MLASpec:
    plain, rotated = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    if rotated % 2 != 0:
        config.fail(f"`qk_rope_head_dim` must be even, to be rotated, but it is {rotated}")
    check_head_dim(config, spec.rope, rotated)
    return MLASpec(
        q_lora_rank=config.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        qk_nope_head_dim=plain,
        qk_rope_head_dim=rotated,
        v_head_dim=config.integer("v_head_dim", 128),
        softmax_scale=(plain + rotated) ** -0.5 * softmax_factor(config, spec.rope),
        is_interleaved=is_interleaved,
    )


def _expect(config: ConfigFile, name: str, supported: str) -> None:
    """Fail if the field is there and has another value than `supported`."""
    if (found := config.get(name)) not in (None, supported):
        config.fail(f"`{name}` {shown(found)} is not supported; supported is {supported}")


def _num_shared(config: ConfigFile, default: int) -> int:
    """Return the number of shared experts; null in the file means 0."""
    return config.optional_integer("n_shared_experts", default, maximum=MAX_EXPERTS) or 0


def _check_expert_counts(config: ConfigFile, moe: MoeSpec) -> None:
    """Fail if the number of experts per token exceeds the number that a token can choose from."""
    router, experts = moe.router, moe.num_experts
    groups = router.num_groups
    if experts % groups != 0:
        config.fail(f"`n_routed_experts` {experts} must be a multiple of `n_group` {groups}")
    if router.top_groups > groups:
        config.fail(f"`topk_group` must be at most `n_group` {groups}, but it is {router.top_groups}")
    if router.group_score == "top2" and experts // groups < 2:
        config.fail(f"`n_group` {groups} leaves a group of one expert; a group's score takes two")
    if router.top_k > (candidates := experts // groups * router.top_groups):
        config.fail(
            f"`num_experts_per_tok` must be at most {candidates}, which `topk_group` leaves, not {router.top_k}"
        )
