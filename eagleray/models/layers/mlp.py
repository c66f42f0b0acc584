"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from eagleray.models.kernels.reference import Kernels, Rows
from eagleray.models.layers.linear import load_linear, load_summed_linear
from eagleray.models.shares import equal_share
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Weights
from eagleray.parallel import Group

__all__ = ["MLP"]


class MLP:
    """Of the inner features, this rank's share of `tp`."""

    def __init__(self, name: str, spec: ModelSpec, weights: Weights, kernels: Kernels, tp: Group) -> None:
        size, hidden, bias = spec.intermediate_size, spec.hidden_size, spec.mlp_bias
        inner = equal_share(size, tp)
        self._gate_up = load_linear(
            weights,
            kernels,
            [f"{name}.gate_proj", f"{name}.up_proj"],
            [size, size],
            hidden,
            outputs=[inner, inner],
            bias=bias,
            gated=True,
        )
        self._down = load_summed_linear(
            weights, kernels, f"{name}.down_proj", hidden, size, inputs=inner, tp=tp, bias=bias
        )

    def __call__(self, x: Rows) -> Rows:
        """[num_tokens, hidden_size], in and out"""
        return self._down(self._gate_up(x))
