"""Attention over latents in a pass that is native otherwise: a step of the host between native ones, in plain torch.

What such a step needs to know of a batch is worked out once before the pass, for all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.torch.attention import DeviceBatch
from eagleray.kernels.torch.backend import Context, HiddenStates, TorchBackend
from eagleray.kernels.torch.context import ForwardContext
from eagleray.kernels.torch.mla import MLAParams, latent_attention
from eagleray.models.layers.rope import Rope

CPU = torch.device("cpu")


class NativeMLA:
    """Of one model. `kernels`: those that it is recorded with; `plain`: those that compute in the step."""

    def __init__(self, kernels: TorchBackend, plain: TorchBackend) -> None:
        self._kernels = kernels
        self._plain = plain
        self._context: ForwardContext | None = None

    def attention(self, heads: MLAParams) -> Callable[[HiddenStates, HiddenStates, Tensor, Context], HiddenStates]:
        """As `TorchBackend.latent_attention`."""
        attend = latent_attention(heads, self._plain)
        size = heads.num_heads * heads.value_dim

        def apply(queries: HiddenStates, latents: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
            def compute(queries: Tensor, latents: Tensor) -> Tensor:
                assert self._context is not None, "`begin` comes before the pass"
                return attend(queries, latents, cache, self._context)

            return self._kernels.host(compute, [queries, latents], size=size)

        return apply

    def begin(self, batch: ForwardBatch, cache: KVCache, rope: Rope) -> None:
        """The next pass computes this batch."""
        tensors = DeviceBatch.of(batch, CPU)
        cos, sin = rope.table(tensors.positions)  # rows between native steps are float32
        self._context = ForwardContext(
            cos=torch.cat((cos, cos), dim=-1)[:, None],
            sin=torch.cat((-sin, sin), dim=-1)[:, None],
            slots=tensors.slots,
            plans={None: self._plain.plan_attention(tensors, cache.layers[0], None)},
        )
