"""Self-attention over a cache of latents: DeepSeek's multi-head latent attention.

Tensor-parallel ranks have a share of the heads each. The latent is small and serves all heads: every rank computes and
caches it whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, Operation
from eagleray.kernels.params import MLAParams
from eagleray.models.layers.linear import load_linear, load_summed_linear
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.sharding import features, shard
from eagleray.models.spec import MLASpec, ModelSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import TensorParallelGroup

NORM_EPS = 1e-6
"""Of the norms inside; config.json does not name it."""


class MLAAttention:
    """Of the heads, this rank's share of `tp`."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        weights: Weights,
        kernels: KernelBackend,
        tp: TensorParallelGroup,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        assert spec.mla is not None
        latent, hidden, bias = spec.mla, spec.hidden_size, spec.qkv_bias
        rank, heads = latent.kv_lora_rank, shard(spec.num_heads, tp)
        self._queries = _load_queries(name, spec, heads, weights, kernels)
        down = f"{name}.kv_a_proj_with_mqa"
        self._latents = kernels.linear(
            _sorted(weights.load(f"{down}.weight", (latent.cached_size, hidden)), latent, num_heads=1),
            _sorted(weights.load(f"{down}.bias", (latent.cached_size,)), latent, num_heads=1) if bias else None,
        )
        made_dim = latent.qk_nope_head_dim + latent.v_head_dim
        made = weights.load(
            f"{name}.kv_b_proj.weight", (spec.num_heads * made_dim, rank), Cut(0, features(heads, made_dim))
        ).unflatten(0, (len(heads), made_dim))
        self._attend = kernels.mla_attention(
            MLAParams(
                num_heads=len(heads),
                plain_dim=latent.qk_nope_head_dim,
                rotated_dim=latent.qk_rope_head_dim,
                value_dim=latent.v_head_dim,
                scale=latent.softmax_scale,
                norm=weights.load(f"{name}.kv_a_layernorm.weight", (rank,)),
                norm_eps=NORM_EPS,
                keys=made[:, : latent.qk_nope_head_dim].contiguous(),
                values=made[:, latent.qk_nope_head_dim :].contiguous(),
            )
        )
        values = latent.v_head_dim
        self._output = load_summed_linear(
            weights,
            kernels,
            f"{name}.o_proj",
            hidden,
            spec.num_heads * values,
            inputs=features(heads, values),
            tp=tp,
            bias=spec.output_bias,
            sequence_parallel=sequence_parallel,
        )

    def __call__(self, x: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `sequence_parallel` only this rank's
        tokens come out. `cache` is this layer's."""
        return self._output(self._attend(self._queries(x), self._latents(x), cache, context))


def _load_queries(name: str, spec: ModelSpec, heads: range, weights: Weights, kernels: KernelBackend) -> Operation:
    """From the hidden state to the queries of these heads, in one product or in two with a norm between."""
    assert spec.mla is not None
    latent, hidden = spec.mla, spec.hidden_size

    def last_product(last: str, in_features: int) -> Operation:
        shape, cut = (spec.num_heads * latent.query_dim, in_features), Cut(0, features(heads, latent.query_dim))
        weight = weights.load(f"{name}.{last}.weight", shape, cut)
        return kernels.linear(_sorted(weight, latent, num_heads=len(heads)), None)

    if latent.q_lora_rank is None:
        return last_product("q_proj", hidden)
    rank = latent.q_lora_rank
    down = load_linear(weights, kernels, [f"{name}.q_a_proj"], [rank], hidden, bias=spec.qkv_bias)
    norm = kernels.norm(weights.load(f"{name}.q_a_layernorm.weight", (rank,)), NORM_EPS)
    up = last_product("q_b_proj", rank)
    return lambda x: up(norm(down(x)))


def _sorted(weight: Tensor, latent: MLASpec, *, num_heads: int) -> Tensor:
    """Return a weight or a bias with its outputs in the order of `kernels.torch.functional.rotate`: of the rotated
    features, the last ones of each head, the first halves of all pairs and then the second ones. The sums over queries
    and keys do not depend on the order. Changes the tensor itself."""
    if latent.is_interleaved:
        rotated = weight.unflatten(0, (num_heads, -1))[:, -latent.qk_rope_head_dim :]
        rotated.copy_(torch.cat((rotated[:, 0::2], rotated[:, 1::2]), dim=1))
    return weight
