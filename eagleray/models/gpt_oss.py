"""gpt-oss: attention with sinks and with a window in every other layer. The checkpoint has all experts of a layer in
one tensor of each kind, as numbers of the model's dtype or in four bits (`mxfp4.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.quantized import MXFP4_BLOCK, Mxfp4Weight, Weight, WeightFormat
from eagleray.models import mxfp4
from eagleray.models.base import Model, register
from eagleray.models.config_file import MAX_EXPERTS, MAX_POSITIONS, ConfigFile
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.layer import WeightGroup
from eagleray.models.layers.linear import linear
from eagleray.models.moe.experts import DeclareExpert, Expert, MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.part import ModelPart
from eagleray.models.sharding import shard
from eagleray.models.spec import Defaults, ModelSpec, MoeSpec, layer_windows, read_common
from eagleray.models.weights import Alias, Param, Part, Weights

GPT_OSS = Defaults(
    vocab_size=201_088,
    hidden_size=2880,
    intermediate_size=2880,
    num_layers=36,
    num_heads=64,
    num_kv_heads=8,
    max_position_embeddings=131_072,
    norm_eps=1e-5,
    head_dim=64,
    rope_theta=150_000.0,
)

ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Parameters for a config.json without any."""

QUANTIZATION = "mxfp4"


@register("GptOssForCausalLM")
class GptOss(Model):
    @staticmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
            config = ConfigFile(config.path, config.fields | {"rope_parameters": ROPE})
        spec = read_common(config, "GptOssForCausalLM", GPT_OSS, methods=[QUANTIZATION])
        has_bias = config.boolean("attention_bias", True)
        alternating = ["sliding_attention", "full_attention"]
        kinds = [alternating[layer % 2] for layer in range(spec.num_layers)]
        window = config.optional_integer("sliding_window", 128, maximum=MAX_POSITIONS)
        is_mxfp4 = config.get("quantization_config") is not None
        if is_mxfp4 and (spec.hidden_size % MXFP4_BLOCK or spec.intermediate_size % MXFP4_BLOCK):
            config.fail(
                f"with {QUANTIZATION}, `hidden_size` and `intermediate_size` must be multiples of {MXFP4_BLOCK}"
            )
        return replace(
            spec,
            windows=layer_windows(config, spec.num_layers, window, kinds),
            qkv_bias=has_bias,
            output_bias=has_bias,
            has_sinks=True,
            moe=MoeSpec(
                num_experts=(count := config.integer("num_local_experts", 128, maximum=MAX_EXPERTS)),
                router=RouterParams(
                    top_k=config.integer("num_experts_per_tok", 4, maximum=count),
                    renormalize=True,  # a softmax over the chosen experts
                    round_weights=True,
                ),
                intermediate_size=spec.intermediate_size,
                layers=(True,) * spec.num_layers,
                clamp=ClampedSwiglu(
                    alpha=config.number("swiglu_alpha", 1.702),
                    limit=config.number("swiglu_limit", 7.0),
                ),
                is_mxfp4=is_mxfp4,
            ),
        )

    def make_layer(self, index: int) -> DecoderLayer:
        name, part, layout = f"model.layers.{index}", self.part, self.experts
        assert layout is not None and part.spec.moe is not None
        num_experts, hidden = part.spec.moe.num_experts, part.spec.hidden_size
        router = linear([f"{name}.mlp.router"], [num_experts], hidden, bias=True, is_quantizable=False)
        expert = _interleaved_expert(f"{name}.mlp.experts", part, layout)
        attention = Attention(f"{name}.self_attn", part.spec.windows[index], part, layout.sequence_parallel)
        aliases = _plain_matrices(f"{name}.mlp.experts", part) if part.spec.is_mxfp4 else []
        moe = MoeBlock(f"{name}.mlp", index, part, layout, expert=expert, router=router, aliases=aliases)
        return DecoderLayer(name, attention, moe, part, layout.sequence_parallel)


def _interleaved_expert(name: str, part: ModelPart, layout: ExpertLayout) -> DeclareExpert:
    """Return the declaration of experts whose tensors interleave gate and up projection."""
    moe, hidden = part.spec.moe, part.spec.hidden_size
    assert moe is not None
    size, tp_size = moe.intermediate_size, 1 if layout.is_divided else layout.tp.size
    keeps_mxfp4 = (
        moe.is_mxfp4 and WeightFormat.MXFP4 in part.kernels.kept_formats and size // MXFP4_BLOCK >= tp_size
    )  # else some ranks would have no block
    inner = _inner_features(size, layout, in_blocks=keeps_mxfp4)
    per_column = MXFP4_BLOCK if keeps_mxfp4 else 1
    adds_bias = layout.is_divided or layout.tp.rank == 0  # added once, not by every rank that has a shard of the expert

    def gate_up_rows(whole: Tensor) -> Tensor:
        return torch.cat([whole[first::2][inner.start : inner.stop] for first in (0, 1)])

    def inner_columns(whole: Tensor) -> Tensor:
        return whole[:, inner.start // per_column : inner.stop // per_column].contiguous()

    def matrix(weights: Weights, params: Sequence[Param], local: Callable[[Tensor], Tensor]) -> Weight:
        is_plain = len(params) == 1
        if is_plain and not keeps_mxfp4:
            return weights.quantize(local(weights.load(params[0]).t()))
        blocks, scales = mxfp4.encode(weights.load(params[0]).t()) if is_plain else map(weights.load, params)
        if keeps_mxfp4:
            return Mxfp4Weight(local(blocks), local(scales))
        return local(mxfp4.decode(blocks, scales, part.dtype))

    def declare(expert: int) -> WeightGroup:
        return declare_form(expert, True, declare_form(expert, False)) if moe.is_mxfp4 else declare_form(expert, False)

    def declare_form(expert: int, is_mxfp4: bool, alternative: WeightGroup | None = None) -> WeightGroup:
        place = Part(expert)
        gate_up = _matrix(f"{name}.gate_up_proj", (moe.num_experts, 2 * size, hidden), place, is_mxfp4)
        down = _matrix(f"{name}.down_proj", (moe.num_experts, hidden, size), place, is_mxfp4)
        gate_up_bias = Param(f"{name}.gate_up_proj_bias", (moe.num_experts, 2 * size), place)
        down_bias = Param(f"{name}.down_proj_bias", (moe.num_experts, hidden), place)

        def make(weights: Weights, kernels: KernelBackend) -> Expert:
            gated, back = matrix(weights, gate_up, gate_up_rows), matrix(weights, down, inner_columns)
            offset = weights.load(down_bias)
            return (
                kernels.gated_linear(gated, gate_up_rows(weights.load(gate_up_bias)), moe.clamp),
                kernels.linear(back, offset if adds_bias else torch.zeros_like(offset)),
            )

        return WeightGroup([*gate_up, gate_up_bias, *down, down_bias], make, alternative=alternative)

    return declare


def _matrix(name: str, shape: tuple[int, int, int], place: Part, is_mxfp4: bool) -> list[Param]:
    """Declare one expert's matrix of a tensor with all experts, [num_experts, rows, columns] once it is decoded: plain
    numbers, which are stored transposed, or the blocks and scales of an `Mxfp4Weight`."""
    num_experts, rows, columns = shape
    if not is_mxfp4:
        return [Param(name, (num_experts, columns, rows), place)]
    scales = (num_experts, rows, columns // MXFP4_BLOCK)
    return [
        Param(f"{name}_blocks", (*scales, mxfp4.BLOCK_BYTES), place, torch.uint8, parameters=2),
        Param(f"{name}_scales", scales, place, torch.uint8, parameters=0),
    ]


def _plain_matrices(name: str, part: ModelPart) -> list[Alias]:
    """Return the tensors of plain numbers that an update may bring in place of blocks and scales."""
    assert part.spec.moe is not None
    count, size, hidden = part.spec.moe.num_experts, part.spec.moe.intermediate_size, part.spec.hidden_size
    shapes = {f"{name}.gate_up_proj": (count, hidden, 2 * size), f"{name}.down_proj": (count, size, hidden)}
    return [
        Alias(alias, shape, lambda tensor, alias=alias: iter([(alias, tensor)]))  # type: ignore[misc]
        for alias, shape in shapes.items()
    ]


def _inner_features(size: int, layout: ExpertLayout, *, in_blocks: bool) -> range:
    """Return this rank's part of an expert's inner features. `in_blocks`: it consists of whole blocks of MXFP4, of
    which some ranks then have one more than others."""
    if layout.is_divided:
        return range(size)
    if not in_blocks:
        return shard(size, layout.tp)
    rank, num_ranks, num_blocks = layout.tp.rank, layout.tp.size, size // MXFP4_BLOCK
    first, last = (index * num_blocks // num_ranks for index in (rank, rank + 1))
    return range(first * MXFP4_BLOCK, last * MXFP4_BLOCK)
