"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from eagleray.kernels.backend import HiddenStates, KernelBackend
from eagleray.models.layers.linear import load_linear, load_partial_linear, load_summed_linear
from eagleray.models.sharding import shard
from eagleray.models.weights import Weights
from eagleray.parallel.group import TensorParallelGroup


class MLP:
    """A feed-forward layer with this rank's shard of the `size` inner features. If `is_summed` is false, the caller
    adds up the outputs of the ranks."""

    def __init__(
        self,
        name: str,
        weights: Weights,
        kernels: KernelBackend,
        tp: TensorParallelGroup,
        *,
        hidden_size: int,
        size: int,
        bias: bool = False,
        is_summed: bool = True,
    ) -> None:
        inner = shard(size, tp)
        self._gate_up = load_linear(
            weights,
            kernels,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            [size, size],
            hidden_size,
            outputs=[inner, inner],
            bias=bias,
            gated=True,
        )
        load_down = load_summed_linear if is_summed else load_partial_linear
        self._down = load_down(weights, kernels, f"{name}.down_proj", hidden_size, size, inputs=inner, tp=tp, bias=bias)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape."""
        return self._down(self._gate_up(x))
