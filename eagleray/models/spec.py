"""The geometry of a model, read from config.json. A model and its weights are built from a `ModelSpec`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagleray.config.json_files import shown
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.rope_spec import RopeSpec
from eagleray.models.config_file import MAX_LAYERS, MAX_POSITIONS, MAX_VOCAB_SIZE, ConfigFile
from eagleray.models.quantized_formats.choose import METHODS, Fp8Blocks, read_quantization
from eagleray.models.quantized_formats.stored_format import StoredFormat
from eagleray.models.rope_config import check_head_dim, read_rope, scaled_max_positions


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeSpec:
    """The mixture-of-experts layers."""

    num_experts: int
    router: RouterParams
    """The choice of each token's experts, without the checkpoint's correction bias."""
    intermediate_size: int
    """Intermediate size of one expert."""
    layers: tuple[bool, ...]
    """[num_layers] whether the layer has experts; the others are dense"""
    has_correction_bias: bool = False
    """Whether the checkpoint has the router's `e_score_correction_bias`."""
    shared_intermediate_size: int = 0
    """Intermediate size of all shared experts together, which compute every token; 0: the model has none."""
    clamp: ClampedSwiglu | None = None
    """The gate of the experts in place of silu."""
    is_mxfp4: bool = False
    """Whether the checkpoint has the experts' projections in four bits (`mxfp4.py`)."""

    @property
    def top_k(self) -> int:
        """Experts that compute each token."""
        return self.router.top_k


@dataclass(frozen=True, slots=True, kw_only=True)
class MLASpec:
    """Attention that caches one latent for all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1). Keys and values of
    the heads are products with the latent; the rotated part of the keys is the same for all heads."""

    q_lora_rank: int | None
    """Size of the queries' own latent; None: queries are products with the hidden state."""
    kv_lora_rank: int
    """Size of the latent."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Size of the rotated part of a head's query and key, which follows the plain one."""
    v_head_dim: int
    softmax_scale: float
    is_interleaved: bool
    """Whether in the checkpoint two features that are rotated together are neighbours, and not half a head apart."""

    @property
    def query_dim(self) -> int:
        """Features of a head's query."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def cached_size(self) -> int:
        """Features of a token in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Intermediate size of a dense layer."""
    num_layers: int
    num_heads: int
    num_kv_heads: int
    """1 with `mla`."""
    head_dim: int
    """Features of a head; with `mla` only the rotated ones."""
    norm_eps: float
    rope: RopeSpec
    tie_embeddings: bool
    max_model_len: int
    """Longest sequence, in tokens, that the model was trained for."""
    dtype: str | None
    """The checkpoint's own number format: bfloat16, float16 or float32; None if config.json does not say it."""
    windows: tuple[int | None, ...]
    """[num_layers] window of each layer: the number of positions that a position sees, itself included; None: all up
    to and including itself"""
    qkv_bias: bool = False
    output_bias: bool = False
    """Whether the attention's output projection has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether the queries and keys of each head are normalized before they are rotated."""
    moe: MoeSpec | None = None
    mla: MLASpec | None = None
    """None: the keys and values of every head are cached."""
    has_sinks: bool = False
    """Whether every head has a sink, see `kernels.params.AttentionParams`."""
    fp8_block: tuple[int, int] | None = None
    """Rows and columns that share a scale in a checkpoint of FP8 weights with a scale for each block."""
    stored_format: StoredFormat | None = None
    """The format of the weights of a checkpoint that is quantized in another way; None also for MXFP4."""
    num_draft_layers: int = 0
    """Layers in the checkpoint after the last one, which predict further tokens. They are not loaded with the model."""
    pools: bool = False
    """Whether the model has no head that predicts tokens, because its hidden states are pooled."""
    num_labels: int = 0
    """Number of outputs of the head of a classifier; 0: it has none."""
    label_tokens: tuple[int, ...] = ()
    """See `PoolingSpec`."""

    @property
    def is_mxfp4(self) -> bool:
        """Whether the checkpoint has the experts' projections in four bits."""
        return self.moe is not None and self.moe.is_mxfp4

    @property
    def feature_sizes(self) -> list[int]:
        """Features of the vectors between a layer's products. The CPU kernels serve even ones only."""
        sizes = [self.hidden_size, self.head_dim, self.intermediate_size]
        if self.moe is not None:
            sizes += [self.moe.intermediate_size, self.moe.shared_intermediate_size]
        if self.mla is not None:
            sizes += [self.mla.q_lora_rank or 0, self.mla.kv_lora_rank, self.mla.qk_nope_head_dim, self.mla.v_head_dim]
        return sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of fields that a family's config.json may omit, as in transformers' configuration class."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int | None
    """Key heads; None: the number of heads."""
    max_position_embeddings: int
    norm_eps: float = 1e-6
    head_dim: int | None = None
    """None: hidden size / heads."""
    rope_theta: float = 10_000.0


def read_common(
    config: ConfigFile, architecture: str, defaults: Defaults, *, methods: Sequence[str] = tuple(METHODS)
) -> ModelSpec:
    """Read the fields that all families have; a family then replaces some. Raises `CheckpointError`.

    `methods`: the quantization methods that the family supports.
    """
    if (activation := config.get("hidden_act") or "silu") not in ("silu", "swish"):
        config.fail(f"`hidden_act` {shown(activation)} is not supported; supported is silu")
    hidden_size = config.integer("hidden_size", defaults.hidden_size)
    num_heads = config.integer("num_attention_heads", defaults.num_heads)
    max_positions = config.integer("max_position_embeddings", defaults.max_position_embeddings, maximum=MAX_POSITIONS)
    rope = read_rope(config, default_theta=defaults.rope_theta, max_position_embeddings=max_positions)
    if not 1 <= (max_model_len := scaled_max_positions(rope, max_positions)) <= MAX_POSITIONS:
        config.fail(
            f"`max_position_embeddings` and the rope's `factor` make a length of {max_model_len} tokens; what is "
            f"possible is 1 to {MAX_POSITIONS}"
        )
    num_layers = config.integer("num_hidden_layers", defaults.num_layers, maximum=MAX_LAYERS)
    head_dim = _head_dim(config, defaults, hidden_size, num_heads)
    check_head_dim(config, rope, head_dim)
    quantization = read_quantization(config, methods)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size", defaults.vocab_size, maximum=MAX_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size", defaults.intermediate_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, defaults, num_heads),
        head_dim=head_dim,
        norm_eps=config.number("rms_norm_eps", defaults.norm_eps),
        rope=rope,
        tie_embeddings=config.boolean("tie_word_embeddings", False),
        max_model_len=max_model_len,
        dtype=_dtype(config),
        windows=(None,) * num_layers,
        fp8_block=quantization.block if isinstance(quantization, Fp8Blocks) else None,
        stored_format=None if isinstance(quantization, Fp8Blocks) else quantization,
    )


def uniform_windows(config: ConfigFile, num_layers: int, default: int | None) -> tuple[int | None, ...]:
    """Return the field `sliding_window` for every layer."""
    return (config.optional_integer("sliding_window", default, maximum=MAX_POSITIONS),) * num_layers


def windows_by_layer(config: ConfigFile, num_layers: int) -> tuple[int | None, ...]:
    """Return windows if `use_sliding_window` is set, for the layers that `layer_types` names, or else for the layers
    from `max_window_layers` on."""
    window = None
    if config.boolean("use_sliding_window", False):
        window = config.optional_integer("sliding_window", 4096, maximum=MAX_POSITIONS)
    if config.get("layer_types") is None:
        first = config.integer("max_window_layers", 28, minimum=0)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return layer_windows(config, num_layers, window, [])


def layer_windows(
    config: ConfigFile, num_layers: int, window: int | None, default: list[str]
) -> tuple[int | None, ...]:
    """Return `window` for the layers that `layer_types` names. `default`: the kinds of layers if it is omitted."""
    kinds = config.get("layer_types")
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.fail(f"`layer_types` must be a list of {num_layers}, one for each layer, but it is {shown(kinds)}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            config.fail(
                f"the layer type {shown(kind)} is not supported; supported are full_attention and sliding_attention"
            )
        if kind == "sliding_attention" and window is None:
            config.fail("`layer_types` names sliding_attention, but no window, or `use_sliding_window` is not set")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _num_kv_heads(config: ConfigFile, defaults: Defaults, num_heads: int) -> int:
    """Read the number of key heads: the number of heads if the field is null, the family's default if it is absent."""
    absent = "num_key_value_heads" not in config.fields
    count = config.integer("num_key_value_heads", (defaults.num_kv_heads if absent else None) or num_heads)
    if num_heads % count != 0:
        config.fail(f"`num_attention_heads` {num_heads} must be a multiple of `num_key_value_heads` {count}")
    return count


def _head_dim(config: ConfigFile, defaults: Defaults, hidden_size: int, num_heads: int) -> int:
    absent = "head_dim" not in config.fields
    head_dim = config.integer("head_dim", (defaults.head_dim if absent else None) or hidden_size // num_heads or None)
    if head_dim % 2 != 0:
        config.fail(f"the head size must be even, to be rotated, but it is {head_dim}")
    return head_dim


def _dtype(config: ConfigFile) -> str | None:
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    if name not in ("bfloat16", "float16", "float32"):
        config.fail(f"`dtype` {shown(value)} is not supported; supported are bfloat16, float16 and float32")
    return str(name)
