"""Self-attention over the paged cache."""

from __future__ import annotations

from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend
from eagleray.kernels.params import AttentionParams
from eagleray.models.layers.linear import load_linear, load_summed_linear
from eagleray.models.layers.sequence_parallel import SequenceParallel
from eagleray.models.sharding import features, kv_heads, shard
from eagleray.models.spec import ModelSpec
from eagleray.models.weights import Cut, Weights
from eagleray.parallel.group import TensorParallelGroup


class Attention:
    """The attention of one layer, with this rank's shard of the heads. `window`: see `ModelSpec.windows`."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        window: int | None,
        weights: Weights,
        kernels: KernelBackend,
        tp: TensorParallelGroup,
        sequence_parallel: SequenceParallel | None = None,
    ) -> None:
        heads, kv, size = shard(spec.num_heads, tp), kv_heads(spec.num_kv_heads, tp), spec.head_dim
        sizes = [count * size for count in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)]
        outputs = [features(part, size) for part in (heads, kv, kv)]
        names = [f"{name}.{part}_proj" for part in "qkv"]
        hidden = spec.hidden_size
        self._qkv = load_linear(weights, kernels, names, sizes, hidden, outputs=outputs, bias=spec.qkv_bias)
        self._output = load_summed_linear(
            weights,
            kernels,
            f"{name}.o_proj",
            hidden,
            sizes[0],
            inputs=outputs[0],
            tp=tp,
            bias=spec.output_bias,
            sequence_parallel=sequence_parallel,
        )
        self._attend = kernels.self_attention(
            AttentionParams(
                num_heads=len(heads),
                num_kv_heads=len(kv),
                head_dim=size,
                window=window,
                q_norm=weights.load(f"{name}.q_norm.weight", (size,)) if spec.qk_norm else None,
                k_norm=weights.load(f"{name}.k_norm.weight", (size,)) if spec.qk_norm else None,
                norm_eps=spec.norm_eps,
                sinks=weights.load(f"{name}.sinks", (spec.num_heads,), Cut(0, heads)) if spec.has_sinks else None,
            )
        )

    def __call__(self, x: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
        """Map hidden states [num_tokens, hidden_size] to the same shape; with `sequence_parallel` only this rank's
        tokens come out. `cache` is this layer's."""
        return self._output(self._attend(self._qkv(x), cache, context))
