"""gpt-oss: attention with sinks and with a window in every other layer. The checkpoint has all experts of a layer in
one tensor of each kind, as numbers of the model's dtype or in four bits (`mxfp4.py`)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.params import ClampedSwiglu, RouterParams
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
    if is_mxfp4 and (spec.hidden_size % mxfp4.BLOCK_SIZE or spec.intermediate_size % mxfp4.BLOCK_SIZE):
        size = mxfp4.BLOCK_SIZE
        config.fail(f"with {QUANTIZATION}, `hidden_size` and `intermediate_size` must be multiples of {size}")
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
    router = load_linear(weights, kernels, [f"{name}.router"], [spec.moe.num_experts], spec.hidden_size, bias=True)
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
    size = moe.intermediate_size
    inner = range(size) if layout.is_divided else shard(size, layout.tp)
    wanted = slice(inner.start, inner.stop)
    adds_bias = layout.is_divided or layout.tp.rank == 0  # added once, not by every rank that has a shard of the expert

    def load(expert: int, weights: Weights) -> Expert:
        def bias(which: str, length: int) -> Tensor:
            return weights.load_part(f"{name}.{which}_bias", (moe.num_experts, length), expert)

        gate_up = _load_matrix(weights, f"{name}.gate_up_proj", moe, expert, 2 * size, hidden_size)
        down = _load_matrix(weights, f"{name}.down_proj", moe, expert, hidden_size, size)
        gate_up_bias, down_bias = bias("gate_up_proj", 2 * size), bias("down_proj", hidden_size)
        return (
            kernels.gated_linear(
                torch.cat((gate_up[0::2][wanted], gate_up[1::2][wanted])),
                torch.cat((gate_up_bias[0::2][wanted], gate_up_bias[1::2][wanted])),
                moe.clamp,
            ),
            kernels.linear(down[:, wanted].contiguous(), down_bias if adds_bias else torch.zeros_like(down_bias)),
        )

    return load


def _load_matrix(weights: Weights, name: str, moe: MoeSpec, expert: int, num_out: int, num_in: int) -> Tensor:
    """Load an expert's matrix [num_out, num_in]."""
    if not moe.is_mxfp4:
        return weights.load_part(name, (moe.num_experts, num_in, num_out), expert).t()
    shape = (moe.num_experts, num_out, num_in // mxfp4.BLOCK_SIZE)
    blocks = weights.load_bytes(f"{name}_blocks", (*shape, mxfp4.BLOCK_BYTES), expert, parameters=2)
    scales = weights.load_bytes(f"{name}_scales", shape, expert, parameters=0)
    return mxfp4.decode(blocks, scales, weights.dtype)
