"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from eagleray.kernels.backend import Attend, Context, HiddenStates, KernelBackend
from eagleray.kernels.params import AttentionParams
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.linear import SummedLinear, linear
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.part import ModelPart
from eagleray.models.sharding import features, kv_heads, shard
from eagleray.models.weights import Cut, Param, WeightRole, Weights


class Attention(Layer):
    """The attention of one layer, with this rank's shard of the heads. `window`: see `ModelSpec.windows`."""

    def __init__(
        self, name: str, window: int | None, part: ModelPart, sequence_parallel: SequenceParallel | None = None
    ) -> None:
        spec = part.spec
        heads, kv, size = shard(spec.num_heads, part.tp), kv_heads(spec.num_kv_heads, part.tp), spec.head_dim
        sizes = [count * size for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        outputs = [features(local, size) for local in (heads, kv, kv)]
        names = [f"{name}.{which}_proj" for which in "qkv"]
        self._qkv = linear(
            names, sizes, spec.hidden_size, outputs=outputs, bias=spec.qkv_bias, role=WeightRole.ATTENTION
        )
        self._attend = _self_attention(name, window, part, heads, kv)
        self._output = SummedLinear(
            f"{name}.o_proj",
            spec.hidden_size,
            sizes[0],
            part,
            inputs=outputs[0],
            bias=spec.output_bias,
            sequence_parallel=sequence_parallel,
            role=WeightRole.ATTENTION,
        )

    def __call__(self, x: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `sequence_parallel` only this rank's
        tokens come out. `cache` is this layer's."""
        return self._output(self._attend(self._qkv(x), cache, context))


def _self_attention(name: str, window: int | None, part: ModelPart, heads: range, kv: range) -> WeightGroup:
    """Declare the attention itself, with the norms of queries and keys and the sinks, if the model has them."""
    spec, params = part.spec, dict[str, Param]()
    if spec.qk_norm:
        params = {which: Param(f"{name}.{which}.weight", (spec.head_dim,)) for which in ("q_norm", "k_norm")}
    if spec.has_sinks:
        params["sinks"] = Param(f"{name}.sinks", (spec.num_heads,), Cut(0, heads))

    def make(weights: Weights, kernels: KernelBackend) -> Attend:
        loaded = {which: weights.load(param) for which, param in params.items()}
        return kernels.self_attention(
            AttentionParams(
                num_heads=len(heads),
                num_kv_heads=len(kv),
                head_dim=spec.head_dim,
                window=window,
                q_norm=loaded.get("q_norm"),
                k_norm=loaded.get("k_norm"),
                norm_eps=spec.norm_eps,
                sinks=loaded.get("sinks"),
            )
        )

    return WeightGroup(list(params.values()), make)
