"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from eagleray.models.context import ForwardContext
from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.linear import load_linear, load_summed_linear
from eagleray.models.shares import equal_share, features, kv_heads
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel import Group

__all__ = ["Attention"]


class Attention:
    """`window`: this layer's, see `ModelSpec.windows`. Of the heads, this rank's share of `tp`."""

    def __init__(
        self, name: str, spec: ModelSpec, window: int | None, weights: Weights, kernels: Kernels, tp: Group
    ) -> None:
        heads, kv = equal_share(spec.num_heads, tp), kv_heads(spec.num_kv_heads, tp)
        self._num_heads, self._head_dim = len(heads), spec.head_dim
        self._num_rotated = len(heads) + len(kv)
        self._window = window
        self._kernels = kernels
        sizes = [count * spec.head_dim for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        outputs = [features(part, spec.head_dim) for part in (heads, kv, kv)]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        hidden = spec.hidden_size
        self._qkv = load_linear(weights, kernels, names, sizes, hidden, outputs=outputs, bias=spec.qkv_bias)
        self._output = load_summed_linear(
            weights, kernels, f"{name}.o_proj", hidden, sizes[0], inputs=outputs[0], tp=tp, bias=spec.output_bias
        )
        self._qk_norm = _load_qk_norm(name, spec.head_dim, len(heads), len(kv), weights) if spec.qk_norm else None
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


def _load_qk_norm(name: str, head_dim: int, num_heads: int, num_kv_heads: int, weights: Weights) -> Tensor:
    """[num_heads + num_kv_heads, head_dim]: one weight for all query heads, one for all key heads."""
    queries = weights.take(f"{name}.q_norm.weight", (head_dim,))
    keys = weights.take(f"{name}.k_norm.weight", (head_dim,))
    heads = queries.new_empty(num_heads + num_kv_heads, head_dim)
    heads[:num_heads], heads[num_heads:] = queries, keys
    return heads
