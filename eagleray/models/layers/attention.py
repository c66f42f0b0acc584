"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from eagleray.models.context import ForwardContext
from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.linear import load_linear
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights

__all__ = ["Attention"]


class Attention:
    """`window`: this layer's, see `ModelSpec.windows`."""

    def __init__(self, name: str, spec: ModelSpec, window: int | None, weights: Weights, kernels: Kernels) -> None:
        self._num_heads, self._head_dim = spec.num_heads, spec.head_dim
        self._num_rotated = spec.num_heads + spec.num_kv_heads
        self._window = window
        self._kernels = kernels
        sizes = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        self._qkv = load_linear(weights, kernels, names, sizes, spec.hidden_size, bias=spec.qkv_bias)
        self._output = load_linear(
            weights, kernels, [f"{name}.o_proj"], [spec.hidden_size], sizes[0], bias=spec.output_bias
        )
        self._qk_norm = _load_qk_norm(name, spec, weights) if spec.qk_norm else None
        self._norm_eps = spec.norm_eps

    def __call__(self, x: Tensor, cache: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], in and out; `cache` is this layer's."""
        qkv = self._qkv(x).unflatten(1, (-1, self._head_dim))  # [num_tokens, heads of q, k and v, head_dim]
        queries_keys = qkv[:, : self._num_rotated]
        normed = queries_keys
        if self._qk_norm is not None:
            normed = self._kernels.rms_norm(queries_keys, self._qk_norm, self._norm_eps)
        self._kernels.rotate(normed, context.cos, context.sin, out=queries_keys)
        queries, keys_values = qkv[:, : self._num_heads], qkv[:, self._num_heads :]
        self._kernels.write_cache(keys_values, cache, context.slots)
        return self._output(self._kernels.attention(queries, keys_values, cache, context.plans[self._window]))


def _load_qk_norm(name: str, spec: ModelSpec, weights: Weights) -> Tensor:
    """[num_heads + num_kv_heads, head_dim]: one weight for all query heads, one for all key heads."""
    queries = weights.take(f"{name}.q_norm.weight", (spec.head_dim,))
    keys = weights.take(f"{name}.k_norm.weight", (spec.head_dim,))
    heads = queries.new_empty(spec.num_heads + spec.num_kv_heads, spec.head_dim)
    heads[: spec.num_heads], heads[spec.num_heads :] = queries, keys
    return heads
