"""The dense feed-forward layer: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from eagleray.kernels.backend import HiddenStates
from eagleray.models.layers.layer import Layer
from eagleray.models.layers.linear import SummedLinear, linear
from eagleray.models.part import ModelPart
from eagleray.models.sharding import shard


class MLP(Layer):
    """A feed-forward layer with this rank's shard of the inner features."""

    def __init__(self, name: str, part: ModelPart) -> None:
        spec = part.spec
        hidden, size, bias = spec.hidden_size, spec.intermediate_size, spec.mlp_bias
        inner = shard(size, part.tp)
        names = [f"{name}.gate_proj", f"{name}.up_proj"]
        self._gate_up = linear(names, [size, size], hidden, outputs=[inner, inner], bias=bias, gated=True)
        self._down = SummedLinear(f"{name}.down_proj", hidden, size, part, inputs=inner, bias=bias)

    def __call__(self, x: HiddenStates) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape."""
        return self._down(self._gate_up(x))
