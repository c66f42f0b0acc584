"""A layer of a decoder: attention and a feed-forward part, each with a norm before it and a residual sum after it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, Operation
from eagleray.models.layers.attention import Attention
from eagleray.models.layers.mlp import MLP
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel.group import TensorParallelGroup

LayerAttention = Callable[[HiddenStates, Tensor, Context], HiddenStates]
"""(hidden states [num_tokens, hidden_size], the layer's cache, context) -> hidden states"""


class DecoderLayer:
    """`sequence_parallel`: the attention returns only this rank's tokens, and the feed-forward part computes these."""

    def __init__(
        self,
        *,
        attention_norm: Operation,
        attention: LayerAttention,
        feed_forward_norm: Operation,
        feed_forward: Operation,
        kernels: KernelBackend,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        self.feed_forward = feed_forward
        self._attention_norm = attention_norm
        self._attention = attention
        self._feed_forward_norm = feed_forward_norm
        self._sequence_parallel = sequence_parallel
        self._add = kernels.add

    def __call__(self, hidden: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape. `cache` is this layer's."""
        attended = self._attention(self._attention_norm(hidden), cache, context)
        if self._sequence_parallel is None:
            return self._feed_forward_and_add(self._add(hidden, attended))
        own = self._feed_forward_and_add(self._add(self._sequence_parallel.local_slice(hidden), attended))
        return self._sequence_parallel.all_gather(own, hidden)

    def _feed_forward_and_add(self, hidden: HiddenStates) -> HiddenStates:
        return self._add(hidden, self.feed_forward(self._feed_forward_norm(hidden)))


def load_decoder_layer(
    index: int,
    spec: ModelSpec,
    weights: Weights,
    kernels: KernelBackend,
    tp: TensorParallelGroup,
    feed_forward: Operation,
    *,
    attention: LayerAttention | None = None,
    sequence_parallel: SequenceParallel | None = None,
) -> DecoderLayer:
    """Load a layer's norms and, unless `attention` is given, the usual attention. `sequence_parallel`: see
    `DecoderLayer`."""
    name = f"model.layers.{index}"

    def norm(which: str) -> Operation:
        return kernels.norm(weights.load(f"{name}.{which}.weight", (spec.hidden_size,)), spec.norm_eps)

    if attention is None:
        attention = Attention(f"{name}.self_attn", spec, spec.windows[index], weights, kernels, tp, sequence_parallel)
    return DecoderLayer(
        attention_norm=norm("input_layernorm"),
        attention=attention,
        feed_forward_norm=norm("post_attention_layernorm"),
        feed_forward=feed_forward,
        kernels=kernels,
        sequence_parallel=sequence_parallel,
    )


def load_dense_layer(
    index: int,
    spec: ModelSpec,
    weights: Weights,
    kernels: KernelBackend,
    tp: TensorParallelGroup,
    experts: object = None,
) -> DecoderLayer:
    """Load a layer without experts; `experts` is unused."""
    mlp = MLP(
        f"model.layers.{index}.mlp",
        weights,
        kernels,
        tp,
        hidden_size=spec.hidden_size,
        size=spec.intermediate_size,
        bias=spec.mlp_bias,
    )
    return load_decoder_layer(index, spec, weights, kernels, tp, mlp)
