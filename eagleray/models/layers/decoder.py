"""A layer of a decoder: attention and a feed-forward part, each with a norm before it and a residual sum after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, Operation
from eagleray.models.layers.layer import Layer
from eagleray.models.layers.linear import norm
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.part import ModelPart

LayerAttention = Callable[[HiddenStates, Tensor, Context], HiddenStates]
"""(hidden states [num_tokens, hidden_size], the layer's cache, context) -> hidden states"""


class DecoderLayer(Layer):
    """`sequence_parallel`: the attention returns only this rank's tokens, and the feed-forward part computes these."""

    def __init__(
        self,
        name: str,
        attention: LayerAttention,
        feed_forward: Operation,
        part: ModelPart,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        size, eps = part.spec.hidden_size, part.spec.norm_eps
        self._attention_norm = norm(f"{name}.input_layernorm", size, eps)
        self._attention = attention
        self._feed_forward_norm = norm(f"{name}.post_attention_layernorm", size, eps)
        self.feed_forward = feed_forward
        self._sequence_parallel = sequence_parallel
        self._add = part.kernels.add

    def __call__(self, hidden: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape. `cache` is this layer's."""
        attended = self._attention(self._attention_norm(hidden), cache, context)
        if self._sequence_parallel is None:
            return self._feed_forward_and_add(self._add(hidden, attended))
        own = self._feed_forward_and_add(self._add(self._sequence_parallel.local_slice(hidden), attended))
        return self._sequence_parallel.all_gather(own, hidden)

    def _feed_forward_and_add(self, hidden: HiddenStates) -> HiddenStates:
        return self._add(hidden, self.feed_forward(self._feed_forward_norm(hidden)))
