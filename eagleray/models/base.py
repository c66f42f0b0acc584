"""A decoder-only language model: token ids in, hidden states and logits out.

Made by the registry, driven by the worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.models.batch import Batch
from eagleray.models.cache import KVCache
from eagleray.models.context import ForwardContext
from eagleray.models.kernels.reference import Kernels, LinearKernel
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.embedding import Embedding
from eagleray.models.layers.norm import RMSNorm
from eagleray.models.layers.rope import Rope
from eagleray.models.spec import ModelSpec

__all__ = ["Model"]


class Model:
    """Immutable once made; what it remembers of a sequence is in the cache alone."""

    def __init__(
        self,
        *,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: LinearKernel,
        rope: Rope,
        num_parameters: int,
    ) -> None:
        self.spec = spec
        self.dtype = dtype
        self.device = device
        self.num_parameters = num_parameters
        self._kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope
        self._windows = frozenset(spec.windows)

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens and cache their keys and values -> hidden states [num_tokens, hidden_size]."""
        context = self._context(batch, cache)
        hidden = self._embedding(batch.token_ids)
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            hidden = layer(hidden, layer_cache, context)
        return self._norm(hidden)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [n, hidden_size] -> float32 [n, vocab_size]"""
        return self._head(hidden).float()

    def _context(self, batch: Batch, cache: KVCache) -> ForwardContext:
        cos, sin = self._rope.angles(batch.positions)
        plans = {window: self._kernels.plan_attention(batch, cache.layers[0], window) for window in self._windows}
        return ForwardContext(cos=cos, sin=sin, slots=batch.slots, plans=plans)
