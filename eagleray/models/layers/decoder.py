"""One layer of a decoder: attention, then a feed-forward part, each behind a norm and added to what came in."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eagleray.models.context import ForwardContext
from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.mlp import MLP
from eagleray.models.layers.norm import RMSNorm
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel import Group

__all__ = ["DecoderLayer", "load_decoder_layer", "load_dense_layer"]

FeedForward = Callable[[Tensor], Tensor]


class DecoderLayer:
    def __init__(
        self, *, attention_norm: RMSNorm, attention: Attention, feed_forward_norm: RMSNorm, feed_forward: FeedForward
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._feed_forward_norm = feed_forward_norm
        self._feed_forward = feed_forward

    def __call__(self, hidden: Tensor, cache: Tensor, context: ForwardContext) -> Tensor:
        """[num_tokens, hidden_size], in and out; `cache` is this layer's."""
        hidden = hidden + self._attention(self._attention_norm(hidden), cache, context)
        return hidden + self._feed_forward(self._feed_forward_norm(hidden))


def load_decoder_layer(
    index: int, spec: ModelSpec, weights: Weights, kernels: Kernels, tp: Group, feed_forward: FeedForward
) -> DecoderLayer:
    name = f"model.layers.{index}"

    def norm(which: str) -> RMSNorm:
        return RMSNorm(weights.take(f"{name}.{which}.weight", (spec.hidden_size,)), spec.norm_eps, kernels)

    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention=Attention(f"{name}.self_attn", spec, spec.windows[index], weights, kernels, tp),
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=feed_forward,
    )


def load_dense_layer(index: int, spec: ModelSpec, weights: Weights, kernels: Kernels, tp: Group) -> DecoderLayer:
    mlp = MLP(f"model.layers.{index}.mlp", spec, weights, kernels, tp)
    return load_decoder_layer(index, spec, weights, kernels, tp, mlp)
