"""Multi-head latent attention in a pass that is native otherwise: a Python call between native ops, in plain torch.

The state of a batch that such a call needs is computed once before the pass, for all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.recording import MLAAttentionOp
from eagleray.kernels.rope import Rope
from eagleray.kernels.torch.attention import DeviceBatch, ForwardContext, build_attention_metadata
from eagleray.kernels.torch.mla import LatentAttention

CPU = torch.device("cpu")


class NativeMLA:
    """The latent attentions of one pass, possibly none."""

    def __init__(self, rope: Rope) -> None:
        self._rope = rope
        self._cache: Tensor | None = None  # of any of these attentions
        self._context: ForwardContext | None = None

    def attention(self, op: MLAAttentionOp) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the function that computes `op` for the batch that was prepared last."""
        attend = LatentAttention(op.params)
        self._cache = op.cache

        def compute(queries: Tensor, latents: Tensor) -> Tensor:
            assert self._context is not None, "`prepare` comes before the pass"
            return attend(queries, latents, op.cache, self._context)

        return compute

    @property
    def is_used(self) -> bool:
        """Whether the pass has an attention of this kind."""
        return self._cache is not None

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the next pass, which computes `batch`."""
        assert self._cache is not None
        tensors = DeviceBatch.of(batch, CPU)
        cos, sin = self._rope.table(tensors.positions)  # not `angles`: hidden states between native ops are float32
        self._context = ForwardContext(
            cos=torch.cat((cos, cos), dim=-1)[:, None],
            sin=torch.cat((-sin, sin), dim=-1)[:, None],
            slot_mapping=tensors.slot_mapping,
            metadata={None: build_attention_metadata(tensors, self._cache, None)},
        )
