"""Mixtral: experts in every layer, under tensor names of its own. A token's weights stay float32 until the sum over its
experts is done."""

from __future__ import annotations

from dataclasses import replace

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.params import RouterParams
from eagleray.models.config_file import MAX_EXPERTS, ConfigFile
from eagleray.models.layers.decoder import DecoderLayer, load_decoder_layer
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.spec import Defaults, ModelSpec, MoeSpec, read_common, uniform_windows
from eagleray.models.weights import Weights
from eagleray.parallel.group import TensorParallelGroup

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


def read_mixtral(config: ConfigFile) -> ModelSpec:
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


def load_layer(
    index: int,
    spec: ModelSpec,
    weights: Weights,
    kernels: KernelBackend,
    tp: TensorParallelGroup,
    experts: ExpertLayout | None,
) -> DecoderLayer:
    assert experts is not None
    moe = MoeBlock(
        f"model.layers.{index}.block_sparse_moe",
        index,
        spec,
        weights,
        kernels,
        experts,
        projections=("w1", "w3", "w2"),
    )
    return load_decoder_layer(index, spec, weights, kernels, tp, moe, sequence_parallel=experts.sequence_parallel)
