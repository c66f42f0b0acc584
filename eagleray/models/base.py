"""A decoder-only language model, or the part of one that a rank has: token ids in, hidden states and logits out.

Made by the registry, driven by the worker. The ranks of an engine make the same calls; between them the hidden states
travel here, inside `forward`, and the parts of logits inside `logits`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, Operation
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import CacheShape, KVCache
from eagleray.kernels.rope import Rope
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.embedding import Head
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.moe.rebalance import Rebalancer
from eagleray.models.sharding import kv_heads
from eagleray.models.spec import ModelSpec
from eagleray.parallel.groups import Groups


class Model:
    """Immutable once made, but for where its experts are; what it remembers of a sequence is in the cache alone.

    `embedding` is the first stage's, `norm` and `head` are the last one's; `layers` are those of this stage. `experts`:
    of a model that has some; `rebalancer`: if ranks have them between them.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        groups: Groups,
        dtype: torch.dtype,
        device: torch.device,
        kernels: KernelBackend,
        embedding: Operation | None,
        layers: Sequence[DecoderLayer],
        norm: Operation | None,
        head: Head | None,
        rope: Rope,
        num_parameters: int,
        experts: ExpertLayout | None = None,
        rebalancer: Rebalancer | None = None,
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
        self.kernels_name = type(kernels).__name__
        self.ranking = kernels.ranking
        """Of the logits."""
        self.trace: ExpertTrace | None = None if experts is None else experts.trace
        """Which experts are chosen; None if there are none."""
        self.has_sequence_shards = experts is not None and experts.sequence_parallel is not None
        """The rows of `trace` are those of `token_shard`, not those of the whole batch."""
        self.exchanges_tokens = experts is not None and experts.dispatch is not None
        """Rows of the batch go to ranks that have their experts."""
        self.rebalancer = rebalancer
        self._experts = experts
        self._works = False
        self._hidden_dtype = kernels.hidden_dtype(dtype)
        self._kernels = kernels
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        own = groups.mesh.layers(spec.num_layers)
        windows = frozenset(spec.windows[own.start : own.stop])
        self._run = kernels.compile(self._compute, rope=rope, windows=windows, device=device, tp=groups.tp)

    def cache_shape(self, block_size: int) -> CacheShape:
        """Of the cache that `forward` wants, with blocks of so many tokens."""
        if self.spec.mla is not None:
            block = self._kernels.mla_cache_block(block_size, self.spec.mla.cached_size)
        else:
            block = self._kernels.cache_block(block_size, self.num_local_kv_heads, self.spec.head_dim)
        return CacheShape(num_layers=self.num_local_layers, block_size=block_size, block=block)

    def begin_step(self, is_idle: bool, num_tokens: int) -> bool:
        """Whether any engine works in the step that begins: this one, unless `is_idle`, or one of those that it shares
        experts with, which begin it together. `num_tokens`: of this engine's batch.

        Raises `ExpertGroupBroken` if one of them is gone, as `forward` does.
        """
        if self._experts is not None and self._experts.spans_engines:
            self._works = self._experts.agree(is_idle, num_tokens)
        else:
            self._works = not is_idle
        return self._works

    @torch.inference_mode()
    def rebalance_if_due(self) -> None:
        """Behind every step: move experts to where they are needed, now and then."""
        if self.rebalancer is not None:
            self.rebalancer.step()

    @torch.inference_mode()
    def on_group_formed(self) -> None:
        """The group that shares the experts was formed, by all of its ranks at the same time."""
        if self.rebalancer is not None:
            self.rebalancer.settle()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens and cache their keys and values -> hidden states [num_tokens, hidden_size].

        A stage after the first takes its input from the one before; one before the last sends its output to the next
        one, which need not be ready. What is returned may be overwritten by the next call. A batch of no tokens helps
        other engines that work.
        """
        num_tokens = batch.num_tokens
        if self._experts is not None:
            self._experts.set_num_tokens(num_tokens)
        if num_tokens == 0 and not self._works:
            return torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        hidden = self._run(self._receive(batch) if self._embedding is None else batch.token_ids, batch, cache)
        if self._norm is None and num_tokens > 0:
            assert self.groups.stages is not None
            self.groups.stages.send_hidden(hidden.clone())  # it may still be under way when it is overwritten
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """On the last stage alone: hidden states [n, hidden_size] -> float32 [n, vocab_size] on its first rank. None
        on its other ranks, which must make the call too. They may be overwritten by the next call."""
        assert self._head is not None, "only the last stage has logits"
        return self._head(hidden)

    def _compute(self, x: HiddenStates, caches: Sequence[Tensor], context: Context) -> HiddenStates:
        """From token ids, or what the stage before has sent, to what this stage sends or the head takes."""
        hidden = x if self._embedding is None else self._embedding(x)
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden = layer(hidden, cache, context)
        return hidden if self._norm is None else self._norm(hidden)

    def _receive(self, batch: ForwardBatch) -> Tensor:
        shape = (batch.num_tokens, self.spec.hidden_size)
        if batch.num_tokens == 0:
            return torch.empty(shape, dtype=self._hidden_dtype, device=self.device)
        assert self.groups.stages is not None
        return self.groups.stages.receive_hidden(shape, self._hidden_dtype, self.device)
