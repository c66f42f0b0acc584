"""gpt-oss: attention with sinks and with a window in every other layer. The checkpoint has all experts of a layer in
one tensor of each kind, as numbers of the model's dtype or in four bits (`mxfp4.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.params import ClampedSwiglu, RouterParams
from eagleray.kernels.quantized import MXFP4_BLOCK, Mxfp4Weight, Weight, WeightFormat
from eagleray.models import mxfp4
from eagleray.models.config_file import MAX_EXPERTS, MAX_POSITIONS, ConfigFile
from eagleray.models.layers.decoder import DecoderLayer, load_decoder_layer
from eagleray.models.layers.linear import load_linear
from eagleray.models.moe.experts import Expert, LoadExpert, MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.sharding import shard
from eagleray.models.spec import Defaults, ModelSpec, MoeSpec, layer_windows, read_common
from eagleray.models.weights import Weights
from eagleray.parallel.group import TensorParallelGroup

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


def read_gpt_oss(config: ConfigFile) -> ModelSpec:
    if config.get("rope_scaling") is None and config.get("rope_parameters") is None:
        config = ConfigFile(config.path, config.fields | {"rope_parameters": ROPE})
    spec = read_common(config, "GptOssForCausalLM", GPT_OSS, quantization=QUANTIZATION)
    has_bias = config.boolean("attention_bias", True)
    alternating = ["sliding_attention", "full_attention"]
    kinds = [alternating[layer % 2] for layer in range(spec.num_layers)]
    window = config.optional_integer("sliding_window", 128, maximum=MAX_POSITIONS)
    is_mxfp4 = config.get("quantization_config") is not None
    if is_mxfp4 and (spec.hidden_size % MXFP4_BLOCK or spec.intermediate_size % MXFP4_BLOCK):
        config.fail(f"with {QUANTIZATION}, `hidden_size` and `intermediate_size` must be multiples of {MXFP4_BLOCK}")
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


def load_layer(
    index: int,
    spec: ModelSpec,
    weights: Weights,
    kernels: KernelBackend,
    tp: TensorParallelGroup,
    experts: ExpertLayout | None,
) -> DecoderLayer:
    assert experts is not None and spec.moe is not None
    name = f"model.layers.{index}.mlp"
    router = load_linear(
        weights, kernels, [f"{name}.router"], [spec.moe.num_experts], spec.hidden_size, bias=True, is_quantizable=False
    )
    moe = MoeBlock(
        name,
        index,
        spec,
        weights,
        kernels,
        experts,
        load_expert=_expert_loader(f"{name}.experts", spec.moe, spec.hidden_size, kernels, experts),
        router=router,
    )
    return load_decoder_layer(index, spec, weights, kernels, tp, moe, sequence_parallel=experts.sequence_parallel)


def _expert_loader(
    name: str, moe: MoeSpec, hidden_size: int, kernels: KernelBackend, layout: ExpertLayout
) -> LoadExpert:
    """Return a loader for experts in whose tensors gate and up projection alternate."""
    size, tp_size = moe.intermediate_size, 1 if layout.is_divided else layout.tp.size
    keeps_mxfp4 = (
        moe.is_mxfp4 and WeightFormat.MXFP4 in kernels.kept_formats and size // MXFP4_BLOCK >= tp_size
    )  # else some ranks would have no block
    inner = _inner_features(size, layout, in_blocks=keeps_mxfp4)
    per_column = MXFP4_BLOCK if keeps_mxfp4 else 1
    adds_bias = layout.is_divided or layout.tp.rank == 0  # added once, not by every rank that has a shard of the expert

    def gate_up_rows(whole: Tensor) -> Tensor:
        return torch.cat([whole[first::2][inner.start : inner.stop] for first in (0, 1)])

    def inner_columns(whole: Tensor) -> Tensor:
        return whole[:, inner.start // per_column : inner.stop // per_column].contiguous()

    def load(expert: int, weights: Weights) -> Expert:
        def matrix(which: str, num_out: int, num_in: int, part: Callable[[Tensor], Tensor]) -> Weight:
            tensor_name = f"{name}.{which}"
            if not moe.is_mxfp4:
                whole = weights.load_part(tensor_name, (moe.num_experts, num_in, num_out), expert)
                return weights.quantize(part(whole.t()))
            blocks, scales = _load_mxfp4(weights, tensor_name, (moe.num_experts, num_out, num_in), expert)
            if keeps_mxfp4:
                return Mxfp4Weight(part(blocks), part(scales))
            return part(mxfp4.decode(blocks, scales, weights.dtype))

        def bias(which: str, length: int) -> Tensor:
            return weights.load_part(f"{name}.{which}_bias", (moe.num_experts, length), expert)

        gate_up = matrix("gate_up_proj", 2 * size, hidden_size, gate_up_rows)
        down, down_bias = matrix("down_proj", hidden_size, size, inner_columns), bias("down_proj", hidden_size)
        return (
            kernels.gated_linear(gate_up, gate_up_rows(bias("gate_up_proj", 2 * size)), moe.clamp),
            kernels.linear(down, down_bias if adds_bias else torch.zeros_like(down_bias)),
        )

    return load


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


def _load_mxfp4(weights: Weights, name: str, shape: tuple[int, int, int], expert: int) -> tuple[Tensor, Tensor]:
    """Load the blocks and scales (see `Mxfp4Weight`) of an expert's matrix, part of a tensor of this shape."""
    *leading, columns = shape
    blocks, scales = (*leading, columns // MXFP4_BLOCK, mxfp4.BLOCK_BYTES), (*leading, columns // MXFP4_BLOCK)
    return (
        weights.load_bytes(f"{name}_blocks", blocks, expert, parameters=2),
        weights.load_bytes(f"{name}_scales", scales, expert, parameters=0),
    )
