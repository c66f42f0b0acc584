"""One layer of a decoder: attention, then a feed-forward part, each behind a norm and added to what came in."""

from __future__ import annotations

from torch import Tensor

from eagleray.models.kernels.reference import Context, Kernels, Operation, Rows
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.mlp import MLP
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel import Group

__all__ = ["DecoderLayer", "load_decoder_layer", "load_dense_layer"]


class DecoderLayer:
    def __init__(
        self,
        *,
        attention_norm: Operation,
        attention: Attention,
        feed_forward_norm: Operation,
        feed_forward: Operation,
        kernels: Kernels,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._feed_forward_norm = feed_forward_norm
        self._feed_forward = feed_forward
        self._add = kernels.add

    def __call__(self, hidden: Rows, cache: Tensor, context: Context) -> Rows:
        """[num_tokens, hidden_size], in and out; `cache` is this layer's."""
        hidden = self._add(hidden, self._attention(self._attention_norm(hidden), cache, context))
        return self._add(hidden, self._feed_forward(self._feed_forward_norm(hidden)))


def load_decoder_layer(
    index: int, spec: ModelSpec, weights: Weights, kernels: Kernels, tp: Group, feed_forward: Operation
) -> DecoderLayer:
    name = f"model.layers.{index}"

    def norm(which: str) -> Operation:
        return kernels.norm(weights.take(f"{name}.{which}.weight", (spec.hidden_size,)), spec.norm_eps)

    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention=Attention(f"{name}.self_attn", spec, spec.windows[index], weights, kernels, tp),
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=feed_forward,
        kernels=kernels,
    )


def load_dense_layer(index: int, spec: ModelSpec, weights: Weights, kernels: Kernels, tp: Group) -> DecoderLayer:
    mlp = MLP(f"model.layers.{index}.mlp", spec, weights, kernels, tp)
    return load_decoder_layer(index, spec, weights, kernels, tp, mlp)
