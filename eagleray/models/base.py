"""A decoder-only language model, or the part of one that a rank has: from token ids to hidden states and logits.

Made by the registry, driven by the worker. The ranks of an engine make the same calls. `forward` sends hidden states
between them, `logits` collects the parts of logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, KernelUnavailable, Operation
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.kv_cache import CacheShape, KVCache
from eagleray.kernels.rope import Rope
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.moe.rebalance import Rebalancer
from eagleray.models.sharding import kv_heads
from eagleray.models.size import activation_bytes
from eagleray.models.spec import ModelSpec
from eagleray.parallel.groups import Groups

TRIAL_TOKENS = 16
"""Tokens of the pass by which kernels are tried."""

LOGIT_COPIES = 4
"""Copies of a step's logits that exist at once while tokens are chosen."""


class Model:
    """A model is immutable after it is made, except for the experts in its expert slots; its only state of a sequence
    is in the cache.

    The first stage has the `embedding`, the last one the `norm` and the `head`; `layers` are those of this stage. A
    model with experts has `experts`; if the ranks divide them, it has a `rebalancer`.
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
        head: Operation | None,
        rope: Rope,
        num_parameters: int,
        experts: ExpertLayout | None = None,
        rebalancer: Rebalancer | None = None,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.spec = spec
        """The geometry of the whole model."""
        self.groups = groups
        self.dtype = dtype
        self.cache_dtype = cache_dtype or dtype
        """Dtype of the cache that `forward` takes."""
        self.device = device
        self.num_parameters = num_parameters
        """Number of parameters on this rank."""
        self.num_local_layers = len(layers)
        self.num_local_kv_heads = len(kv_heads(spec.num_kv_heads, groups.tp))
        self.kernels_name = type(kernels).__name__
        self.ranking = kernels.ranking
        """Finds the highest logits."""
        self.trace: ExpertTrace | None = None if experts is None else experts.trace
        """The experts that were chosen; None if the model has no experts."""
        self.has_sequence_shards = experts is not None and experts.sequence_parallel is not None
        """Whether `trace` has the tokens of this rank's `token_shard`, not those of the whole batch."""
        self.exchanges_tokens = experts is not None and experts.dispatcher is not None
        """Whether tokens go to the ranks that have their experts."""
        self.rebalancer = rebalancer
        self._experts = experts
        self._any_engine_busy = False
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
        """Return the shape of the cache that `forward` needs, with blocks of `block_size` tokens."""
        if self.spec.mla is not None:
            block = self._kernels.mla_cache_block(block_size, self.spec.mla.cached_size)
        else:
            block = self._kernels.cache_block(block_size, self.num_local_kv_heads, self.spec.head_dim)
        return CacheShape(num_layers=self.num_local_layers, block_size=block_size, block=block)

    def begin_step(self, is_idle: bool, num_tokens: int) -> bool:
        """Begin a step, together with all engines that share the experts, and return whether any of them is busy in it.
        This engine is busy unless `is_idle`; `num_tokens` are those of its batch.

        Raises `ExpertGroupBroken` if one of the engines is gone, as `forward` does.
        """
        if self._experts is not None and self._experts.spans_engines:
            self._any_engine_busy = self._experts.agree(is_idle, num_tokens)
        else:
            self._any_engine_busy = not is_idle
        return self._any_engine_busy

    @torch.inference_mode()
    def rebalance_if_due(self) -> None:
        """Count a step that is done, and move experts to balance their load if it is time to."""
        if self.rebalancer is not None:
            self.rebalancer.step()

    @torch.inference_mode()
    def on_group_formed(self) -> None:
        """Synchronize the expert slots of a new expert group. All of its ranks call this at the same time."""
        if self.rebalancer is not None:
            self.rebalancer.on_group_formed()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens, cache their keys and values, and return hidden states [num_tokens, hidden_size].

        A stage after the first receives its input from the previous one; a stage before the last sends its output to
        the next one, which need not be ready. The next call may overwrite the result. With a batch of no tokens this
        rank only computes its experts for other engines that are busy.
        """
        num_tokens = batch.num_tokens
        if self._experts is not None and self.exchanges_tokens:
            self._experts.set_num_tokens(num_tokens)
        if num_tokens == 0 and not self._any_engine_busy:
            return torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        hidden = self._run(self._receive(batch) if self._embedding is None else batch.token_ids, batch, cache)
        if self._norm is None and num_tokens > 0:
            assert self.groups.stages is not None
            self.groups.stages.send_hidden(hidden.clone())  # the original may be overwritten before it is sent
        return hidden

    @torch.inference_mode()
    def try_kernels(self) -> None:
        """Launch every kernel of a pass once. Raises `KernelUnavailable` if one cannot be compiled here."""
        if not self._kernels.compiles_on_demand:
            return
        shape = self.cache_shape(TRIAL_TOKENS)
        cache = KVCache.allocate(shape, num_blocks=1, dtype=self.cache_dtype, device=self.device)
        limits = PassLimits(TRIAL_TOKENS, 2, TRIAL_TOKENS)  # rows with one token and with several
        try:
            self.warm_up(cache, limits, None)
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except Exception as error:  # the compiler's errors are of many kinds: no assembler, no resources, no C compiler
            raise KernelUnavailable(f"a kernel failed with {type(error).__name__}: {error}") from error

    @torch.inference_mode()
    def step_bytes(self, limits: PassLimits, block_size: int) -> int:
        """Return an upper estimate of the memory that steps within `limits` take beside weights and cache.

        On top of the pass itself: hidden states that the next stage has not received yet; the tokens that engines send
        each other for their experts, which may all reach one rank, with an output for each of their experts; and a few
        copies of float32 logits for each row, where they are gathered.
        """
        spec, groups, mesh = self.spec, self.groups, self.groups.mesh
        shape = self.cache_shape(block_size)
        cache = KVCache.allocate(shape, num_blocks=1, dtype=self.cache_dtype, device=self.device)
        of_pass = self._run.num_bytes(cache, limits, size=self._input_size)
        if of_pass is None:
            of_pass = limits.num_tokens * activation_bytes(spec, itemsize=self.dtype.itemsize, tp_size=mesh.tp_size)
        per_token = 0
        if not mesh.is_last_stage:
            per_token += (1 + mesh.pp_size) * spec.hidden_size * self._hidden_dtype.itemsize
        if self.exchanges_tokens and spec.moe is not None:
            num_engines = groups.experts.size // mesh.tp_size
            per_token += num_engines * spec.hidden_size * (2 * self.dtype.itemsize + (2 + spec.moe.top_k) * 4)
        num_logits = spec.vocab_size if groups.is_sampling else spec.vocab_size // mesh.tp_size
        of_logits = limits.num_rows * num_logits * 4 * LOGIT_COPIES if mesh.is_last_stage else 0
        return of_pass + limits.num_tokens * per_token + of_logits

    @torch.inference_mode()
    def reserve(self, cache: KVCache, limits: PassLimits) -> None:
        """Allocate the memory of `forward` for batches within `limits` now."""
        self._run.reserve(cache, limits, size=self._input_size)

    @torch.inference_mode()
    def warm_up(self, cache: KVCache, limits: PassLimits, last_tokens: Tensor | None) -> None:
        """Do what would delay the first calls of `forward` with this cache, see `Forward.warm_up`."""
        self._run.warm_up(cache, limits, size=self._input_size, last_tokens=last_tokens)

    def close(self) -> None:
        """Free what passes have made; later ones make it again. To be called before the groups are left, because NCCL
        waits until captured graphs with its operations are freed, even when it is told to abort."""
        self._run.release()

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return float32 [n, vocab_size] of hidden states [n, hidden_size] on the ranks that sample, and None on the
        other ranks of the last stage, which must make the call too. The next call may overwrite the result."""
        assert self._head is not None, "only the last stage has logits"
        part: Tensor = self._head(hidden)
        if self.groups.tp.size > 1 and self.groups.ranks_sample_alike:
            return self._gather_on_all_ranks(part)
        logits = self.groups.tp.gather(part) if self.groups.tp.size > 1 else part
        return None if logits is None else logits[:, : self.spec.vocab_size].float().contiguous()

    def _gather_on_all_ranks(self, part: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] of all ranks' parts, which have the same shape."""
        tp, (n, width) = self.groups.tp, part.shape
        parts = tp.all_gather(part, [n] * tp.size).view(tp.size, n, width)
        logits = part.new_empty((n, self.spec.vocab_size), dtype=torch.float32)
        for own, target in zip(parts, logits.split(width, dim=1), strict=False):  # the last ranks may have padding only
            target.copy_(own[:, : target.shape[1]])
        return logits

    @property
    def _input_size(self) -> int | None:
        """Features of the hidden states that the previous stage sends, None in the first stage."""
        return None if self._embedding is not None else self.spec.hidden_size

    def _compute(self, x: HiddenStates, caches: Sequence[Tensor], context: Context) -> HiddenStates:
        """Map token ids, or the hidden states of the previous stage, to those for the next stage or the head."""
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
