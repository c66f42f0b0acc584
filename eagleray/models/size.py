"""The number of a model's weights, as its configuration implies it. Pure.

It is checked before anything of that size is read or allocated. Biases, norms and scales are left out, so it is never
larger than the model's own.
"""

from __future__ import annotations

from eagleray.kernels.quantized import WeightFormat
from eagleray.models.spec import ModelSpec
from eagleray.parallel.mesh import Mesh

ITEMSIZES = {WeightFormat.FP8: 1, WeightFormat.MXFP4: 0.5, WeightFormat.INT8: 1, WeightFormat.INT4: 0.5}
"""Bytes of a parameter in each format."""

WHOLE = Mesh()


def num_parameters(spec: ModelSpec) -> int:
    """Return the number of parameters of the whole model."""
    layers = range(spec.num_layers)
    others = spec.num_layers * _attention(spec) + _num_dense(spec, layers) * _dense(spec)
    return others + _num_moe(spec, layers) * (_experts(spec) + _beside_experts(spec)) + _embeddings(spec, WHOLE)


def weight_bytes(
    spec: ModelSpec, *, itemsize: int, mesh: Mesh, num_expert_ranks: int, kept: WeightFormat | None = None
) -> int:
    """Return the bytes of the weights of the worker with these coordinates, with `itemsize` bytes for each parameter.

    `num_expert_ranks`: the number of workers that divide the experts of a layer. `kept`: the format of quantized
    weights: in MXFP4 these are the experts, in other formats the weights of all layers.
    """
    layers, tp = mesh.layers(spec.num_layers), mesh.tp_size
    experts = _num_moe(spec, layers) * _experts(spec) // num_expert_ranks
    others = len(layers) * _attention(spec) + _num_dense(spec, layers) * _dense(spec)
    others += _num_moe(spec, layers) * _beside_experts(spec)
    of_experts = itemsize if kept is None else ITEMSIZES[kept]
    of_others = itemsize if kept in (None, WeightFormat.MXFP4) else ITEMSIZES[kept]
    return int(experts * of_experts) + int(others // tp * of_others) + _embeddings(spec, mesh) // tp * itemsize


def activation_bytes(spec: ModelSpec, *, itemsize: int, tp_size: int) -> int:
    """Return an estimate of the memory that plain torch takes for a token in a forward pass, for one rank: a few copies
    of its hidden state and of the rank's shard of the widest activation of a layer."""
    if (mla := spec.mla) is not None:
        heads = mla.query_dim + mla.qk_nope_head_dim + mla.v_head_dim
        attention = spec.num_heads // tp_size * heads + mla.cached_size
    else:
        attention = (spec.num_heads // tp_size + 2 * max(spec.num_kv_heads // tp_size, 1)) * spec.head_dim
    experts = spec.moe.top_k * spec.moe.intermediate_size if spec.moe else 0
    widest = max(attention, 2 * spec.intermediate_size // tp_size, 2 * experts // tp_size)
    return (4 * spec.hidden_size + 3 * widest) * itemsize


def _attention(spec: ModelSpec) -> int:
    if (mla := spec.mla) is None:
        return 2 * spec.hidden_size * (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    queries = spec.num_heads * mla.query_dim
    rank = mla.q_lora_rank
    of_queries = spec.hidden_size * queries if rank is None else rank * (spec.hidden_size + queries)
    of_keys = spec.hidden_size * mla.cached_size
    of_heads = mla.kv_lora_rank * spec.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return of_queries + of_keys + of_heads + spec.num_heads * mla.v_head_dim * spec.hidden_size


def _dense(spec: ModelSpec) -> int:
    return 3 * spec.hidden_size * spec.intermediate_size


def _experts(spec: ModelSpec) -> int:
    return 0 if spec.moe is None else 3 * spec.hidden_size * spec.moe.intermediate_size * spec.moe.num_experts


def _beside_experts(spec: ModelSpec) -> int:
    """Count the parameters of a layer's router and shared experts."""
    if spec.moe is None:
        return 0
    return spec.hidden_size * (spec.moe.num_experts + 3 * spec.moe.shared_intermediate_size)


def _embeddings(spec: ModelSpec, mesh: Mesh) -> int:
    """Count the parameters of the embedding and the head, if the stage has them."""
    count = int(mesh.is_first_stage) + int(mesh.is_last_stage and not spec.pools)
    if spec.tie_embeddings:
        count = min(count, 1)
    return count * spec.vocab_size * spec.hidden_size


def _num_moe(spec: ModelSpec, layers: range) -> int:
    return 0 if spec.moe is None else sum(spec.moe.layers[index] for index in layers)


def _num_dense(spec: ModelSpec, layers: range) -> int:
    return len(layers) - _num_moe(spec, layers)
