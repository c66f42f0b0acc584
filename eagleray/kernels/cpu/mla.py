"""Multi-head latent attention in a pass that is native otherwise: a host op between native ones, in plain torch.

The state of a batch that such an op needs is computed once before the pass, for all layers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.backend import AttendLatents, Context, HiddenStates, KernelBackend
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.params import MLAParams
from eagleray.kernels.rope import Rope
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext, build_attention_metadata
from eagleray.kernels.torch.mla import LatentAttention

CPU = torch.device("cpu")


class NativeMLA:
    """The latent attentions of one model. `backend` records them."""

    def __init__(self, backend: KernelBackend) -> None:
        self._backend = backend
        self._context: ForwardContext | None = None

    def attention(self, params: MLAParams) -> AttendLatents:
        """See `KernelBackend.mla_attention`."""
        attend = LatentAttention(params)
        size = params.num_heads * params.value_dim

        def apply(queries: HiddenStates, latents: HiddenStates, cache: Tensor, context: Context) -> HiddenStates:
            def compute(queries: Tensor, latents: Tensor) -> Tensor:
                assert self._context is not None, "`prepare` comes before the pass"
                return attend(queries, latents, cache, self._context)

            return self._backend.host(compute, [queries, latents], size=size)

        return apply

    def prepare(self, batch: ForwardBatch, cache: KVCache, rope: Rope) -> None:
        """Prepare the next pass, which computes `batch`."""
        tensors = DeviceBatch.of(batch, CPU)
        cos, sin = rope.table(tensors.positions)  # not `angles`: hidden states between native ops are float32
        self._context = ForwardContext(
            cos=torch.cat((cos, cos), dim=-1)[:, None],
            sin=torch.cat((-sin, sin), dim=-1)[:, None],
            slot_mapping=tensors.slot_mapping,
            metadata={None: build_attention_metadata(tensors, cache.layers[0], None)},
        )
