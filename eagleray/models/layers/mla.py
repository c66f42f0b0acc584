"""Self-attention over a cache of latents: DeepSeek's multi-head latent attention (MLA).

The heads are divided among the tensor-parallel ranks. The latent is small and serves all heads, so every rank computes
and caches it whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.backend import AttendLatents, Context, HiddenStates, KernelBackend, Operation
from eagleray.kernels.grouped import GroupedWeight
from eagleray.kernels.params import MLAParams
from eagleray.kernels.quantized import Fp8Weight, LoadedWeight, select_rows
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.linear import SummedLinear, linear, norm
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.part import ModelPart
from eagleray.models.sharding import features, shard
from eagleray.models.spec import MLASpec, ModelSpec
from eagleray.models.weights import Cut, Param, WeightRole, Weights

NORM_EPS = 1e-6
"""Epsilon of the inner norms, which config.json does not contain."""


class MLAAttention(Layer):
    """The attention of one layer, with this rank's shard of the heads."""

    def __init__(self, name: str, part: ModelPart, sequence_parallel: SequenceParallel | None = None) -> None:
        spec, mla = part.spec, part.spec.mla
        assert mla is not None
        heads = shard(spec.num_heads, part.tp)
        self._queries = MLAQueries(name, spec, mla, heads)
        self._latents = _latents(f"{name}.kv_a_proj_with_mqa", spec, mla)
        self._attend = _mla_attention(name, spec, mla, heads)
        self._output = SummedLinear(
            f"{name}.o_proj",
            spec.hidden_size,
            spec.num_heads * mla.v_head_dim,
            part,
            inputs=features(heads, mla.v_head_dim),
            bias=spec.output_bias,
            sequence_parallel=sequence_parallel,
            role=WeightRole.ATTENTION,
        )

    def __call__(self, x: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `sequence_parallel` only this rank's
        tokens come out. `cache` is this layer's."""
        return self._output(self._attend(self._queries(x), self._latents(x), cache, context))


class MLAQueries(Layer):
    """Maps hidden states to the queries of these heads: by one product, or by two with a norm between."""

    def __init__(self, name: str, spec: ModelSpec, mla: MLASpec, heads: range) -> None:
        rank, hidden = mla.q_lora_rank, spec.hidden_size
        self._down = self._norm = None
        if rank is not None:
            self._down = linear([f"{name}.q_a_proj"], [rank], hidden, bias=spec.qkv_bias, role=WeightRole.ATTENTION)
            self._norm = norm(f"{name}.q_a_layernorm", rank, NORM_EPS)
        last, size = ("q_proj", hidden) if rank is None else ("q_b_proj", rank)
        up = Param(
            f"{name}.{last}.weight",
            (spec.num_heads * mla.query_dim, size),
            Cut(0, features(heads, mla.query_dim)),
            role=WeightRole.ATTENTION,
        )

        def make(weights: Weights, kernels: KernelBackend) -> Operation:
            return kernels.linear(_sort_rotated_rows(weights.load_weight([up]), mla, num_heads=len(heads)), None)

        self._up = WeightGroup([up], make)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        if self._down is not None and self._norm is not None:
            x = self._norm(self._down(x))
        return self._up(x)


def _latents(name: str, spec: ModelSpec, mla: MLASpec) -> WeightGroup:
    """Declare the product that maps hidden states to latents and the rotated part of the keys."""
    params = [Param(f"{name}.weight", (mla.cached_size, spec.hidden_size), role=WeightRole.ATTENTION)]
    if spec.qkv_bias:
        params.append(Param(f"{name}.bias", (mla.cached_size,)))

    def make(weights: Weights, kernels: KernelBackend) -> Operation:
        weight = _sort_rotated_rows(weights.load_weight(params[:1]), mla, num_heads=1)
        return kernels.linear(
            weight, _sort_rotated(weights.load(params[1]), mla, num_heads=1) if spec.qkv_bias else None
        )

    return WeightGroup(params, make)


def _mla_attention(name: str, spec: ModelSpec, mla: MLASpec, heads: range) -> WeightGroup:
    """Declare the attention itself, with the matrices that map latents to keys and values."""
    rank, kv_dim = mla.kv_lora_rank, mla.qk_nope_head_dim + mla.v_head_dim
    expand = Param(f"{name}.kv_b_proj.weight", (spec.num_heads * kv_dim, rank), Cut(0, features(heads, kv_dim)))
    latent_norm = Param(f"{name}.kv_a_layernorm.weight", (rank,))

    def make(weights: Weights, kernels: KernelBackend) -> AttendLatents:
        kv = weights.load(expand).unflatten(0, (len(heads), kv_dim))
        return kernels.mla_attention(
            MLAParams(
                num_heads=len(heads),
                plain_dim=mla.qk_nope_head_dim,
                rotated_dim=mla.qk_rope_head_dim,
                value_dim=mla.v_head_dim,
                scale=mla.softmax_scale,
                norm=weights.load(latent_norm),
                norm_eps=NORM_EPS,
                keys=kv[:, : mla.qk_nope_head_dim].contiguous(),
                values=kv[:, mla.qk_nope_head_dim :].contiguous(),
            )
        )

    return WeightGroup([expand, latent_norm], make)


def _sort_rotated_rows(weight: LoadedWeight, mla: MLASpec, *, num_heads: int) -> LoadedWeight:
    """Reorder the outputs of a weight, which may be quantized, as `_sort_rotated` does."""
    if isinstance(weight, Tensor):
        return _sort_rotated(weight, mla, num_heads=num_heads)
    assert isinstance(weight, Fp8Weight | GroupedWeight)
    if not mla.is_interleaved:
        return weight
    order = _sort_rotated(torch.arange(weight.shape[0]), mla, num_heads=num_heads)
    return weight.select_rows(order) if isinstance(weight, GroupedWeight) else select_rows(weight, order)


def _sort_rotated(weight: Tensor, mla: MLASpec, *, num_heads: int) -> Tensor:
    """Reorder the outputs of a weight or a bias as `kernels.torch.functional.rotate` expects them. Of the rotated
    features, which are the last ones of each head, the first halves of all pairs come first, then the second halves.
    The sums over queries and keys do not depend on the order."""
    if not mla.is_interleaved:
        return weight
    plain, rotated = weight.unflatten(0, (num_heads, -1)).tensor_split([-mla.qk_rope_head_dim], dim=1)
    return torch.cat((plain, rotated[:, 0::2], rotated[:, 1::2]), dim=1).flatten(0, 1)
