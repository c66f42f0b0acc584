"""A decoder-only language model, or the part of one that a rank has: token ids in, hidden states and logits out.

Made by the registry, driven by the worker. The ranks of an engine make the same calls; between them the hidden states
travel here, inside `forward`, and the parts of logits inside `logits`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.models.batch import Batch
from eagleray.models.cache import CacheShape, KVCache
from eagleray.models.context import ForwardContext
from eagleray.models.kernels.reference import Kernels
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.embedding import Embedding, Head
from eagleray.models.layers.norm import RMSNorm
from eagleray.models.layers.rope import Rope
from eagleray.models.shares import kv_heads
from eagleray.models.spec import ModelSpec
from eagleray.parallel import Groups

__all__ = ["Model"]


class Model:
    """Immutable once made; what it remembers of a sequence is in the cache alone.

    `embedding` is the first stage's, `norm` and `head` are the last one's; `layers` are those of this stage.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
        kernels: Kernels,
        embedding: Embedding | None,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm | None,
        head: Head | None,
        rope: Rope,
        num_parameters: int,
    ) -> None:
        self.spec = spec
        """Of the whole model."""
        self.groups = groups
        self.dtype = dtype
        self.device = device
        self.num_parameters = num_parameters
        """Of this rank."""
        self.num_local_layers = len(layers)
        self.num_local_kv_heads = len(kv_heads(spec.num_kv_heads, groups.tp))
        self._kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._rope = rope
        own = groups.mesh.layers(spec.num_layers)
        self._windows = frozenset(spec.windows[own.start : own.stop])

    @property
    def cache_shape(self) -> CacheShape:
        """Of the cache that `forward` wants."""
        return CacheShape(
            num_layers=self.num_local_layers, num_kv_heads=self.num_local_kv_heads, head_dim=self.spec.head_dim
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens and cache their keys and values -> hidden states [num_tokens, hidden_size].

        A stage after the first takes its input from the one before; one before the last sends its output to the next
        one, which need not be ready.
        """
        context = self._context(batch, cache)
        hidden = self._receive(batch) if self._embedding is None else self._embedding(batch.token_ids)
        for layer, layer_cache in zip(self._layers, cache.layers, strict=True):
            hidden = layer(hidden, layer_cache, context)
        if self._norm is not None:
            return self._norm(hidden)
        self.groups.stages.send_hidden(hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """On the last stage alone: hidden states [n, hidden_size] -> float32 [n, vocab_size] on its first rank. None
        on its other ranks, which must make the call too."""
        assert self._head is not None, "only the last stage has logits"
        return self._head(hidden)

    def _receive(self, batch: Batch) -> Tensor:
        shape = (len(batch.token_ids), self.spec.hidden_size)
        return self.groups.stages.receive_hidden(shape, self.dtype, self.device)

    def _context(self, batch: Batch, cache: KVCache) -> ForwardContext:
        cos, sin = self._rope.angles(batch.positions)
        plans = {window: self._kernels.plan_attention(batch, cache.layers[0], window) for window in self._windows}
        return ForwardContext(cos=cos, sin=sin, slots=batch.slots, plans=plans)
