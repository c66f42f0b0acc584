"""A decoder-only language model, or the part of one that a rank has: from token ids to hidden states and logits.

Families are subclasses in modules of their own. Made by the registry, driven by the worker. The ranks of an engine make
the same calls. `forward` sends hidden states between them, `logits` collects the parts of logits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from eagleray.kernels.backend import Context, HiddenStates, KernelBackend, KernelUnavailable
from eagleray.kernels.decode_table import DecodeTable
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.inference import inference_mode
from eagleray.kernels.kv_cache import CacheShape, KVCache
from eagleray.kernels.rope import Rope
from eagleray.models.adapters import ModelAdapters
from eagleray.models.config_file import ConfigFile
from eagleray.models.layers.decoder import DecoderLayer
from eagleray.models.layers.embedding import EMBEDDING, HEAD, EmbeddingAndHead
from eagleray.models.layers.layer import Layer, WeightGroup
from eagleray.models.layers.linear import norm
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.moe.rebalance import Rebalancer
from eagleray.models.part import ModelPart
from eagleray.models.sharding import kv_heads
from eagleray.models.size import activation_bytes
from eagleray.models.spec import ModelSpec
from eagleray.models.tensor_names import TensorNames, is_cache_scale
from eagleray.models.update import WeightUpdate
from eagleray.models.updates import ModelUpdates
from eagleray.models.weights import Cut, Param, Weights
from eagleray.process.malloc import malloc_trim

TRIAL_TOKENS = 16
"""Tokens of the pass by which kernels are tried."""

LOGIT_COPIES = 4
"""Copies of a step's logits that exist at once while tokens are chosen."""


LABEL_HEAD = "score.weight"
"""The head of a classifier, which has no bias."""

FAMILIES: dict[str, type[Model]] = {}
"""The families that have been imported, by the architecture's name in config.json."""

FamilyClass = TypeVar("FamilyClass", bound="type[Model]")


def register(architecture: str) -> Callable[[FamilyClass], FamilyClass]:
    """Register a family under the name of its architecture."""

    def add(family: FamilyClass) -> FamilyClass:
        FAMILIES[architecture] = family
        return family

    return add


class Model(ABC):
    """A family of models is a subclass, which reads its config.json and makes its layers.

    The first stage has the embedding, the last one the norm and the head; `_layers` are those of this stage. A model
    with experts has `experts`; if the ranks divide them, it has a `rebalancer`. A model computes once `load` has made
    its operations. From then on its only state of a sequence is in the cache.
    """

    def __init__(
        self, part: ModelPart, experts: ExpertLayout | None = None, *, cache_dtype: torch.dtype | None = None
    ) -> None:
        spec, groups, kernels = part.spec, part.groups, part.kernels
        self.part = part
        self.experts = experts
        self.spec = spec
        """The geometry of the whole model."""
        self.groups = groups
        self.dtype = part.dtype
        self.cache_dtype = cache_dtype or part.dtype
        """Dtype of the cache that `forward` takes."""
        self.device = part.device
        own = part.mesh.layers(spec.num_layers)
        self.num_local_layers = len(own)
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
        self.rebalancer: Rebalancer | None = None
        self.adapters: ModelAdapters | None = None
        """Slots for adapters, once `enable_adapters` was called."""
        self._any_engine_busy = False
        shares_experts = experts is not None and (experts.spans_engines or experts.dispatcher is not None)
        self._decodes_alone = groups.mesh.world_size == 1 and not shares_experts
        self._hidden_dtype = kernels.hidden_dtype(part.dtype)
        self._kernels = kernels
        self._vocabulary = EmbeddingAndHead(part)
        self._is_first_stage = part.mesh.is_first_stage
        self._layers = [self.make_layer(index) for index in own]
        self._norm = self._make_norm() if part.mesh.is_last_stage else None
        self._score = self._make_score() if part.mesh.is_last_stage and spec.num_labels else None
        self.updates = ModelUpdates(
            part, find_groups=self.weight_groups, find_names=self._tensor_names, num_threads=self._num_threads
        )
        self._run = kernels.compile(
            self._compute,
            rope=Rope(spec.rope, spec.head_dim, dtype=part.dtype, device=part.device),
            windows=frozenset(spec.windows[own.start : own.stop]),
            device=part.device,
            tp=groups.tp,
        )

    @staticmethod
    @abstractmethod
    def read_spec(config: ConfigFile) -> ModelSpec:
        """Read the geometry of a model of this family. Raises `CheckpointError`."""

    @abstractmethod
    def make_layer(self, index: int) -> DecoderLayer:
        """Declare a layer, which may be one of another stage."""

    def weight_groups(self) -> Iterator[WeightGroup]:
        """Yield the groups of tensors that this rank has."""
        for part in self._parts():
            yield from part.groups()

    def params(self) -> Iterator[Param]:
        """Yield the tensors that this rank loads; the tensors of an expert once for each of its slots."""
        for group in self.weight_groups():
            yield from group.params

    def names(self) -> Iterator[str]:
        """Yield the names of the whole model's tensors."""
        yield from self._vocabulary.names()
        for index in range(self.spec.num_layers):
            yield from self.make_layer(index).names()
        yield from self._make_norm().names()
        if self.spec.num_labels:
            yield self._score_name

    def may_be_dropped(self, name: str) -> bool:
        """Whether a checkpoint may have a tensor of this name, although no layer needs it: old ones hold computed
        tables, some with tied embeddings hold the tied weight twice, some hold draft layers, which are left out, or
        scales for the cache, and a model that pools may have been made to predict tokens."""
        first, spec = self.spec.num_layers, self.spec
        drafts = tuple(f"model.layers.{index}." for index in range(first, first + spec.num_draft_layers))
        if name.startswith(drafts) or name.endswith("rotary_emb.inv_freq") or is_cache_scale(name):
            return True
        return (name == HEAD and (spec.tie_embeddings or spec.pools)) or (name == LABEL_HEAD and spec.pools)

    @property
    def num_parameters(self) -> int:
        """Number of parameters on this rank."""
        return sum(param.local_size * param.parameters for param in self.params())

    def named_parameters(self) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
        """Yield the name in the checkpoint, the whole shape and the dtype of each tensor that this rank has, whole or
        in part."""
        params = {param.name: param for param in self.params()}
        for name, param in params.items():
            yield name, param.shape, param.dtype or self.dtype

    def start_update(self, *, in_place: bool = False) -> WeightUpdate:
        """Start an update of the weights. The one before must be dropped; tensors that wait since a `load_weights` are
        forgotten."""
        return self.updates.start(in_place=in_place)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Replace weights by tensors under the names of the checkpoint, in any order and any number of calls, and
        return the names that the model has. Tensors that are packed together, such as the projections of queries, keys
        and values, are applied when all have come; until then they wait for the next call. Once they have, one of them
        may come alone. While an update is open, the tensors are added to it.

        Raises `WeightsMismatch`, see `WeightUpdate.add`, and after it has applied the other tensors if a head differs
        from the embedding to which it is tied.
        """
        return self.updates.load(weights)

    @property
    def num_loads(self) -> int:
        """Number of calls of `load_weights` that replaced weights without an update."""
        return self.updates.num_loads

    def load(self, weights: Weights) -> None:
        """Make the operations of all layers. Raises `CheckpointError`."""

        def load_part(part: Layer | WeightGroup) -> None:
            part.load(weights, self._kernels)
            malloc_trim()

        pool = ThreadPoolExecutor(self._num_threads, "load")
        try:
            for loaded in [pool.submit(load_part, part) for part in self._parts()]:
                loaded.result()
        finally:
            pool.shutdown(cancel_futures=True)

    def enable_adapters(self, *, num_slots: int, max_rank: int) -> None:
        """Let the tokens of a batch have low-rank adapters. To be called once, between `load` and the first pass.
        Raises `ConfigError` if the model cannot have adapters."""
        layers = (self.make_layer(index) for index in range(self.spec.num_layers))
        self.adapters = ModelAdapters(
            self.part,
            self.weight_groups(),
            (group for layer in layers for group in layer.groups()),
            num_slots=num_slots,
            max_rank=max_rank,
            has_sequence_shards=self.has_sequence_shards,
        )

    def storage(self) -> list[Tensor]:
        """Return the memory of all weights that this rank has, see `OwnsWeights`."""
        return [memory for part in self._parts() for memory in part.storage()]

    @property
    def moe_blocks(self) -> list[MoeBlock]:
        """The experts of each layer of this stage that has some."""
        return [layer.feed_forward for layer in self._layers if isinstance(layer.feed_forward, MoeBlock)]

    @property
    def _num_threads(self) -> int:
        """Number of threads that read and pack weights; on a CPU, every core does."""
        return torch.get_num_threads() if self.device.type == "cpu" else 1

    def _tensor_names(self) -> TensorNames:
        layers = map(self.make_layer, range(self.spec.num_layers))
        aliases = [alias for layer in layers for alias in layer.aliases()]
        tied = (EMBEDDING, HEAD) if self.spec.tie_embeddings and not self.spec.pools else None
        return TensorNames(
            self.names(),
            aliases,
            has_scales=self.spec.fp8_block is not None,
            may_be_dropped=self.may_be_dropped,
            tied=tied,
        )

    def _parts(self) -> Iterator[Layer | WeightGroup]:
        yield self._vocabulary
        yield from self._layers
        if self._norm is not None:
            yield self._norm
        if self._score is not None:
            yield self._score

    def _make_norm(self) -> WeightGroup:
        return norm("model.norm", self.spec.hidden_size, self.spec.norm_eps)

    @property
    def _score_name(self) -> str:
        """Name of the tensor with the head of a classifier."""
        if not self.spec.label_tokens:
            return LABEL_HEAD
        return EMBEDDING if self.spec.tie_embeddings else HEAD

    def _make_score(self) -> WeightGroup:
        """Declare the head of a classifier: a tensor of its own, or rows of the head that predicts tokens. These are
        read with the rows between them, as one shard."""
        spec, tokens = self.spec, self.spec.label_tokens
        if not tokens:
            weight = Param(LABEL_HEAD, (spec.num_labels, spec.hidden_size))
            return WeightGroup([weight], lambda weights, kernels: weights.load(weight))
        first = min(tokens)
        shard = Param(self._score_name, (spec.vocab_size, spec.hidden_size), Cut(0, range(first, max(tokens) + 1)))

        def make(weights: Weights, kernels: KernelBackend) -> Tensor:
            loaded = weights.load(shard)
            rows = torch.stack([loaded[token - first] for token in tokens]).float()
            return rows if spec.num_labels == len(tokens) else rows[1:] - rows[:1]

        return WeightGroup([shard], make)

    def cache_shape(self, block_size: int) -> CacheShape:
        """Return the shape of the cache that `forward` needs, with blocks of `block_size` tokens."""
        if self.spec.mla is not None:
            block = self._kernels.mla_cache_block(block_size, self.spec.mla.cached_size)
        else:
            heads = self.num_local_kv_heads, self.spec.head_dim
            block = self._kernels.cache_block(block_size, *heads, self.cache_dtype)
        return CacheShape(num_layers=self.num_local_layers, block_size=block_size, block=block)

    def begin_step(self, is_idle: bool, num_tokens: int) -> bool:
        """Begin a step, together with all engines that share the experts, and return whether any of them is busy in it.
        This engine is busy unless `is_idle`; `num_tokens` are those of its batch.

        Raises `ExpertGroupBroken` if one of the engines is gone, as `forward` does.
        """
        if self.experts is not None and self.experts.spans_engines:
            self._any_engine_busy = self.experts.agree(is_idle, num_tokens)
        else:
            self._any_engine_busy = not is_idle
        return self._any_engine_busy

    @inference_mode
    def rebalance_if_due(self) -> None:
        """Count a step that is done, and move experts to balance their load if it is time to. No expert moves while an
        update of the weights is open on any rank of the expert group."""
        if self.rebalancer is not None:
            may_move = not self.updates.has_new_weights
            if may_move:
                self.updates.forget()
            self.rebalancer.step(may_move=may_move)

    @torch.inference_mode()
    def on_group_formed(self, *, leaving: Collection[int] = (), has_memory: bool = True) -> str | None:
        """Place the experts in a new expert group, in which the ranks in `leaving` compute none. All of its ranks call
        this at the same time. Without `has_memory`, the memory of weights sleeps. Returns what this rank lacks for the
        experts of those that leave, if these keep them therefore."""
        if self.rebalancer is None:
            return None
        if not self.updates.has_new_weights:
            self.updates.forget()
        return self.rebalancer.on_group_formed(leaving=leaving, has_memory=has_memory)

    @torch.inference_mode()
    def read_missing_experts(self) -> None:
        """Read the experts that a group lacked when it was formed while the memory of weights slept."""
        if self.rebalancer is not None:
            self.rebalancer.read_missing()

    @inference_mode
    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute the batch's tokens, cache their keys and values, and return hidden states [num_tokens, hidden_size].

        A stage after the first receives its input from the previous one; a stage before the last sends its output to
        the next one, which need not be ready. The next call may overwrite the result. With a batch of no tokens this
        rank only computes its experts for other engines that are busy.
        """
        num_tokens = batch.num_tokens
        if self.experts is not None and self.exchanges_tokens:
            self.experts.set_num_tokens(num_tokens)
        if num_tokens == 0 and not self._any_engine_busy:
            return torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        if self.adapters is not None:
            self.adapters.begin_pass(batch.adapters)
        hidden = self._run(batch.token_ids if self._is_first_stage else self._receive(batch), batch, cache)
        if self._norm is None and num_tokens > 0:
            assert self.groups.stages is not None
            self.groups.stages.send_hidden(hidden.clone())  # the original may be overwritten before it is sent
        return hidden

    def decode(self, rows: Sequence[int], cache: KVCache, table: DecodeTable) -> list[int] | None:
        """Compute the last known token of each of `rows` and choose the next one in one call, see `Forward.decode`.
        Returns None, and changes nothing, if that takes `begin_step`, `forward` and `logits`, as it always does with
        other ranks or adapters."""
        has_more = self.adapters is not None or self.rebalancer is not None
        if not self._decodes_alone or has_more or self._vocabulary.head is None:
            return None
        return self._run.decode(rows, cache, self._vocabulary.head, table)

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
    def step_bytes(self, limits: PassLimits, block_size: int, *, num_drafts: int = 0) -> int:
        """Return an upper estimate of the memory that steps within `limits` take beside weights and cache.

        On top of the pass itself: hidden states that the next stage has not received yet; the tokens that engines send
        each other for their experts, which may all reach one rank, with an output for each of their experts; and a few
        copies of float32 logits for each row and each of `num_drafts` drafted tokens, where they are gathered.
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
        num_logits = spec.hidden_size if spec.pools else num_logits  # the vectors of a step
        of_logits = (limits.num_rows + num_drafts) * num_logits * 4 * LOGIT_COPIES if mesh.is_last_stage else 0
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
        """Free the memory of passes and finished updates; later ones allocate it again. To be called before the groups
        are left: NCCL waits until captured graphs with its operations are freed, even if its communicator is
        aborted."""
        self._run.release()
        self.updates.release()

    @inference_mode
    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return float32 [n, vocab_size] of hidden states [n, hidden_size] on the ranks that sample, and None on the
        other ranks of the last stage, which must make the call too. The next call may overwrite the result."""
        assert self._vocabulary.head is not None, "only the last stage has the head"
        part: Tensor = self._vocabulary.head(hidden)
        if self.groups.tp.size > 1 and self.groups.ranks_sample_alike:
            return self._gather_on_all_ranks(part)
        logits = self.groups.tp.gather(part) if self.groups.tp.size > 1 else part
        if logits is None:
            return None
        if logits.shape[1] > self.spec.vocab_size:
            logits = logits[:, : self.spec.vocab_size]
        return logits.float().contiguous()

    @torch.inference_mode()
    def score(self, pooled: Tensor) -> Tensor:
        """Return float32 [n, num_labels] of pooled hidden states [n, hidden_size], in the last stage of a classifier,
        or these states in float32 if the model has no head."""
        if self._score is None:
            return pooled.float()
        # In plain torch and float32: a few rows and labels, whose number no kernel would have to fit. Row by row, so
        # that a row's numbers do not depend on the others.
        weight = self._score.operation.float()
        return torch.stack([torch.mv(weight, row) for row in pooled.float()])

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
        return None if self.groups.mesh.is_first_stage else self.spec.hidden_size

    def _compute(self, x: HiddenStates, caches: Sequence[Tensor], context: Context) -> HiddenStates:
        """Map token ids, or the hidden states of the previous stage, to those for the next stage or the head."""
        hidden = self._vocabulary.embed(x) if self.groups.mesh.is_first_stage else x
        for layer, cache in zip(self._layers, caches, strict=True):
            hidden = layer(hidden, cache, context)
        return hidden if self._norm is None else self._norm(hidden)

    def _receive(self, batch: ForwardBatch) -> Tensor:
        shape = (batch.num_tokens, self.spec.hidden_size)
        if batch.num_tokens == 0:
            return torch.empty(shape, dtype=self._hidden_dtype, device=self.device)
        assert self.groups.stages is not None
        return self.groups.stages.receive_hidden(shape, self._hidden_dtype, self.device)
