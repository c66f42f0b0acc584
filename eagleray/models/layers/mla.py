"""Self-attention over a cache of latents: DeepSeek's multi-head latent attention (MLA).

The heads are divided among the tensor-parallel ranks. The latent is small and serves all heads, so every rank computes
and caches it whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, Operation
from eagleray.kernels.params import MLAParams
from eagleray.kernels.quantized import Fp8Weight, Weight, select_rows
from eagleray.models.layers.linear import load_linear, load_summed_linear
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.sharding import features, shard
from eagleray.models.spec import MLASpec, ModelSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import TensorParallelGroup

NORM_EPS = 1e-6
"""Epsilon of the inner norms, which config.json does not contain."""


class MLAAttention:
    """The attention of one layer, with this rank's shard of the heads."""

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
        mla, hidden, bias = spec.mla, spec.hidden_size, spec.qkv_bias
        rank, heads = mla.kv_lora_rank, shard(spec.num_heads, tp)
        self._queries = _load_queries(name, spec, heads, weights, kernels)
        down = f"{name}.kv_a_proj_with_mqa"
        self._latents = kernels.linear(
            _sort_rotated_rows(weights.load_weight([f"{down}.weight"], [(mla.cached_size, hidden)]), mla, num_heads=1),
            _sort_rotated(weights.load(f"{down}.bias", (mla.cached_size,)), mla, num_heads=1) if bias else None,
        )
        kv_dim = mla.qk_nope_head_dim + mla.v_head_dim
        kv = weights.load(
            f"{name}.kv_b_proj.weight", (spec.num_heads * kv_dim, rank), Cut(0, features(heads, kv_dim))
        ).unflatten(0, (len(heads), kv_dim))
        self._attend = kernels.mla_attention(
            MLAParams(
                num_heads=len(heads),
                plain_dim=mla.qk_nope_head_dim,
                rotated_dim=mla.qk_rope_head_dim,
                value_dim=mla.v_head_dim,
                scale=mla.softmax_scale,
                norm=weights.load(f"{name}.kv_a_layernorm.weight", (rank,)),
                norm_eps=NORM_EPS,
                keys=kv[:, : mla.qk_nope_head_dim].contiguous(),
                values=kv[:, mla.qk_nope_head_dim :].contiguous(),
            )
        )
        values = mla.v_head_dim
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
    """Return the operation from hidden states to the queries of these heads: one product, or two with a norm
    between."""
    assert spec.mla is not None
    mla, hidden = spec.mla, spec.hidden_size

    def last_product(last: str, in_features: int) -> Operation:
        shape, cut = (spec.num_heads * mla.query_dim, in_features), Cut(0, features(heads, mla.query_dim))
        weight = weights.load_weight([f"{name}.{last}.weight"], [shape], [cut])
        return kernels.linear(_sort_rotated_rows(weight, mla, num_heads=len(heads)), None)

    if mla.q_lora_rank is None:
        return last_product("q_proj", hidden)
    rank = mla.q_lora_rank
    down = load_linear(weights, kernels, [f"{name}.q_a_proj"], [rank], hidden, bias=spec.qkv_bias)
    norm = kernels.norm(weights.load(f"{name}.q_a_layernorm.weight", (rank,)), NORM_EPS)
    up = last_product("q_b_proj", rank)
    return lambda x: up(norm(down(x)))


def _sort_rotated_rows(weight: Weight, mla: MLASpec, *, num_heads: int) -> Weight:
    """Reorder the outputs of a weight as `_sort_rotated` does, which is also a quantized one."""
    if isinstance(weight, Tensor):
        return _sort_rotated(weight, mla, num_heads=num_heads)
    assert isinstance(weight, Fp8Weight)
    if not mla.is_interleaved:
        return weight
    return select_rows(weight, _sort_rotated(torch.arange(weight.shape[0]), mla, num_heads=num_heads))


def _sort_rotated(weight: Tensor, mla: MLASpec, *, num_heads: int) -> Tensor:
    """Reorder, in place, the outputs of a weight or a bias as `kernels.torch.functional.rotate` expects them. Of the
    rotated features, which are the last ones of each head, the first halves of all pairs come first, then the second
    halves. The sums over queries and keys do not depend on the order."""
    if mla.is_interleaved:
        rotated = weight.unflatten(0, (num_heads, -1))[:, -mla.qk_rope_head_dim :]
        rotated.copy_(torch.cat((rotated[:, 0::2], rotated[:, 1::2]), dim=1))
    return weight
