"""A worker: one device of an engine, which handles the engine's calls, each in the state that it fits.

Driven by an executor's worker group. An exception leaves the worker as an `Ended` reply, never as an exception.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection
from functools import partial

import msgspec
import numpy as np

from eagleray.config.resolve import logprobs_limit
from eagleray.config.sections import Config, ExecutionConfig
from eagleray.errors import ChannelClosed, ConfigError, ExpertGroupBroken
from eagleray.grammars.compilers import check_backend, load_compiler, max_load_seconds
from eagleray.grammars.matcher import GrammarCompiler
from eagleray.hub.locate import tokenizer_dir, weight_dir
from eagleray.hub.pooling import find_pooling
from eagleray.identity import WorkerId
from eagleray.kernels.kv_cache import KVCache
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.control import SleepTag
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import (
    AdapterWritten,
    AllocateCache,
    Call,
    CallDone,
    CallExtension,
    ExtensionReturned,
    GrammarPrepared,
    GroupJoined,
    JoinGroup,
    LoadModel,
    LoadNullModel,
    MeasureMemory,
    MemoryMeasured,
    OpenGroup,
    PrepareGrammar,
    ReadExpertLoad,
    Reply,
    SleepWorker,
    StageRoutedExperts,
    StepBroken,
    StepPlan,
    StepResult,
    WakeWorker,
    WorkerCall,
    WorkerExpertLoad,
    WorkerReply,
    WorkerSlept,
    WorkerWoke,
    WriteAdapter,
)
from eagleray.messages.weight_transfer import FetchStorage, PollTransfer, TransferCall, TransferReply
from eagleray.messages.workers import EngineOpened, GroupOpened, Topology
from eagleray.models.deepseek_drafts import DeepSeekDrafts
from eagleray.parallel.mesh import EnginePosition, Mesh
from eagleray.process.gc_freeze import freeze_gc
from eagleray.process.host_memory import host_free_bytes
from eagleray.transport.message_queue_peer import MessageQueuePeer
from eagleray.worker.adapters import write_adapter
from eagleray.worker.downloads import downloads_of
from eagleray.worker.draft_layer import DraftLayer
from eagleray.worker.draft_model import DraftModel, Proposer
from eagleray.worker.grammars import COMPILE_TIMEOUT_SECONDS, WorkerGrammars
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.layer_update import LayerUpdates
from eagleray.worker.logprobs import ScoreKind
from eagleray.worker.memory import check_cache_fits, total_bytes
from eagleray.worker.pooler import Pooler
from eagleray.worker.prefault import CachePrefaulter, prefault_chunks
from eagleray.worker.runner import Runner, UnfinishedStep
from eagleray.worker.sampler import HostSampler
from eagleray.worker.sleep import KEEPING_LEVEL, SleepableMemory
from eagleray.worker.startup import JoinedWorker, LoadedWorker, OpenedWorker, WorkerSetup, sampler_of
from eagleray.worker.storage_transfer import SharedStorage
from eagleray.worker.timeouts import (
    DEVICE_POLL_SECONDS,
    JOIN_TIMEOUT_SECONDS,
    POLL_INTERVAL_SECONDS,
    SEND_TIMEOUT_SECONDS,
)
from eagleray.worker.weight_update import WeightUpdater

logger = get_logger(__name__)


class Worker:
    """Holds the current state: `WorkerSetup`, `OpenedWorker`, `JoinedWorker`, `LoadedWorker`, then `ServingWorker`, or
    `NullWorker` for a model that computes nothing.

    `rank` is the worker's number in its engine.
    """

    def __init__(
        self, worker: WorkerId, rank: int, config: Config, topology: Topology, *, device_index: int | None = None
    ) -> None:
        self.rank = rank
        mesh = Mesh(rank=rank, tp_size=topology.tensor_parallel_size, pp_size=topology.pipeline_parallel_size)
        self._setup = WorkerSetup(worker, rank, mesh, config, topology, device_index)
        self._state: WorkerSetup | OpenedWorker | JoinedWorker | LoadedWorker | ServingWorker | NullWorker = self._setup
        self._has_failed = False
        # In a pipeline the first stage may wait for a token of the last stage, so every step is finished at once.
        self._runs_ahead = mesh.pp_size == 1
        self._begun: deque[tuple[int, UnfinishedStep | WorkerReply | None]] = deque()  # by call id, in order

    @property
    def has_broken_device(self) -> bool:
        """Whether a GPU may not answer any longer, because a call has failed on it."""
        return self._has_failed and isinstance(self._state, ServingWorker) and self._state.is_on_gpu

    @property
    def has_unfinished(self) -> bool:
        """Whether a step has begun and is not finished, so that `finish_done` or `finish_oldest` must be called."""
        return bool(self._begun)

    def handle(self, call: Call) -> list[Reply]:
        """Handle `call` and return the replies that are ready, in the order of the calls. A step may be left
        unfinished, while the device computes it; any other call is done when this returns, as are the steps before it.

        There is no reply if another rank reports the result of a step, nor if this worker has failed before: then its
        state is unknown and it ignores all calls.
        """
        replies: list[Reply] = []
        if isinstance(call.body, OpenGroup):
            # On a GPU, steps in flight may wait forever for a rank of another host, until their group is left.
            self._break_steps("its group was left")
        if not isinstance(call.body, StepPlan | PollTransfer | PrepareGrammar):
            replies = self._finish_all()
        if self._has_failed:
            return replies
        try:
            self._begun.append((call.call_id, self._handle(call.body)))
        except Exception as error:
            return [*replies, self._fail(call.call_id, error)]
        return [*replies, *(self.finish_done() if self._runs_ahead else self._finish_all())]

    def finish_done(self) -> list[Reply]:
        """Return the replies to the calls that are done, without waiting for a step."""
        replies: list[Reply] = []
        while self._begun and self._is_done(self._begun[0][1]):
            replies += self.finish_oldest()
        return replies

    def finish_oldest(self) -> list[Reply]:
        """Wait until the oldest unfinished step is computed, and return its reply, if it has one."""
        call_id, body = self._begun.popleft()
        if isinstance(body, UnfinishedStep):
            assert isinstance(self._state, ServingWorker)
            try:
                body = self._state.finish(body)
            except Exception as error:
                return [self._fail(call_id, error)]
        return [] if body is None else [Reply(call_id, self.rank, body)]

    def close(self) -> None:
        """Release the resources of the current state and leave the groups."""
        self._begun.clear()
        self._state.close()

    def _is_done(self, body: UnfinishedStep | WorkerReply | None) -> bool:
        """Whether the call can be finished without waiting."""
        if not isinstance(body, UnfinishedStep):
            return True
        assert isinstance(self._state, ServingWorker)
        try:
            return self._state.is_done(body)
        except RuntimeError:
            return True  # the device has failed, which is reported when the step is finished

    def _finish_all(self) -> list[Reply]:
        replies: list[Reply] = []
        while self._begun:
            replies += self.finish_oldest()
        return replies

    def _break_steps(self, cause: str) -> None:
        """Have the replies to all unfinished steps say that they are broken, without a wait for them."""
        self._begun = deque(
            (call_id, StepBroken(step=body.plan.step, cause=cause) if isinstance(body, UnfinishedStep) else body)
            for call_id, body in self._begun
        )

    def _fail(self, call_id: int, error: Exception) -> Reply:
        self._has_failed = True
        self._begun.clear()
        return Reply(call_id, self.rank, Ended(self._setup.worker, Failure.of(error)))

    def _handle(self, body: WorkerCall) -> UnfinishedStep | WorkerReply | None:
        state = self._state
        match state, body:
            case ServingWorker(), StepPlan():
                return state.begin(body)
            case NullWorker(), StepPlan():
                return state.step(body)
            case ServingWorker(), CallExtension(method, arguments):
                return state.call_extension(method, arguments)
            case ServingWorker(), ReadExpertLoad():
                return state.read_expert_load()
            case ServingWorker(), SleepWorker(tags=tags, level=level):
                return WorkerSlept(state.sleep(tags, level))
            case ServingWorker(), WakeWorker(tags):
                return state.wake_up(tags)
            case ServingWorker(), _ if isinstance(body, TransferCall):
                return state.transfer_weights(body)
            case ServingWorker(), WriteAdapter():
                return state.write_adapter(body)
            case ServingWorker(), PrepareGrammar(grammar):
                return state.prepare_grammar(grammar)
            case ServingWorker(), OpenGroup("expert", epoch, ranks):
                return state.open_expert_group(epoch, self._position(ranks))
            case ServingWorker(), JoinGroup("expert", epoch, members, leaving):
                return state.join_expert_group(epoch, members, leaving)
            case WorkerSetup(), OpenGroup("engine"):
                self._state = opened = OpenedWorker(state)
                return opened.opened
            case OpenedWorker(), JoinGroup("engine", _, [engine]):
                self._state = state.join(engine.opened)
            case JoinedWorker(), LoadModel(expert_group_size):
                self._state = loaded = LoadedWorker(state, expert_group_size)
                return loaded.describe()
            case LoadedWorker(), MeasureMemory(max_num_batched_tokens):
                return MemoryMeasured(state.available_bytes(max_num_batched_tokens))
            case LoadedWorker(), AllocateCache(num_blocks, max_num_batched_tokens):
                self._state = ServingWorker(state, num_blocks, max_num_batched_tokens)
            case ((WorkerSetup() | NullWorker()), LoadNullModel()):
                self._state = NullWorker(is_sampler=self._setup.mesh.is_sampler)
            case _:
                raise RuntimeError(f"{type(body).__name__} is not a call for the state {type(state).__name__}")
        return CallDone()

    def _position(self, ranks: list[int] | None) -> EnginePosition | None:
        """Return the position of the engine among those of these data-parallel ranks."""
        rank = self._setup.worker.engine.rank
        return None if ranks is None else EnginePosition(rank=sorted(ranks).index(rank), size=len(ranks))


class ServingWorker:
    """Last state: the cache is allocated, so the worker takes steps.

    A worker of an expert group takes none from the moment its group is left until it has joined the next one.
    """

    def __init__(self, loaded: LoadedWorker, num_blocks: int, max_num_batched_tokens: int) -> None:
        model, config = loaded.model, loaded.setup.config
        num_rows, block_size = config.scheduling.max_num_seqs, config.cache.block_size
        self.is_on_gpu = loaded.device.type == "cuda"
        self._model = model
        self._groups = loaded.groups
        self._tp_ranks = loaded.mesh.tp_ranks
        # Ranks that compute the same tokens count the same, so only the first of them reports.
        self._reports_load = model.trace is not None and (loaded.mesh.tp_rank == 0 or model.has_sequence_shards)
        self._extension = loaded.extension
        self._broken: str | None = None  # cause why no step can be taken, until an expert group is joined
        shape = model.cache_shape(block_size)
        check_cache_fits(
            num_blocks * loaded.bytes_per_block,
            total=total_bytes(model.device),
            num_workers=1 if self.is_on_gpu else loaded.setup.num_workers_on_host(),
        )
        cache = KVCache.allocate(shape, num_blocks=num_blocks, dtype=model.cache_dtype, device=model.device)
        reported_kind = ScoreKind.of(config.model.logprobs_mode)
        self._grammars = _grammars_of(loaded)
        if self._grammars is not None and not config.model.skip_tokenizer_init:
            self._grammars.warm_up(model.spec.vocab_size)
        sampler = sampler_of(model, num_rows, reported_kind, self._grammars)
        limits = loaded.limits(max_num_batched_tokens)
        model.warm_up(cache, limits, sampler.last_tokens)
        sampler.warm_up(num_rows, num_logprobs=logprobs_limit(config.model, model.spec.vocab_size))
        rows = InputBatch(num_rows=num_rows, max_model_len=loaded.max_model_len, block_size=block_size)
        self._draft_model = loaded.draft_model
        draft_cache: KVCache | None = None
        proposer: Proposer | None = None
        if (draft := loaded.draft_model) is not None:
            assert isinstance(sampler, HostSampler), "on GPUs drafts are refused"
            draft_cache = KVCache.allocate(
                draft.cache_shape(block_size), num_blocks=num_blocks, dtype=draft.cache_dtype, device=draft.device
            )
            draft.warm_up(draft_cache, limits, None)
            if isinstance(draft, DeepSeekDrafts):
                proposer = DraftLayer(draft, draft_cache, rows, sampler)
            else:
                proposer = DraftModel(draft, draft_cache, rows, sampler, max_tokens=limits.num_tokens)
        self._runner = Runner(
            model,
            cache,
            rows,
            sampler,
            downloads_of(model.device),
            reports_logits=reported_kind.is_logits,
            pooler=_pooler_of(loaded),
            proposer=proposer,
            wait=self._wait_until_done,
        )
        self._cache = cache
        self._memory = SleepableMemory(model, cache, limits, sampler.last_tokens, draft_cache=draft_cache)
        self._prefaulter = CachePrefaulter(cache, self._runner)
        self._weights = WeightUpdater(
            LayerUpdates(model, draft).start if isinstance(draft, DeepSeekDrafts) else model.start_update,
            rank=loaded.rank,
            device=loaded.device,
            init_defaults=config.execution.weight_transfer_config,
            timeout=config.recovery.weight_update_timeout,
            locate=partial(weight_dir, config.model),
            storage=SharedStorage(
                model.storage,
                _layout_facts(loaded),
                loaded.setup.topology.addresses[loaded.rank],
                is_readable=lambda: self._memory.has_weights,
                num_loads=lambda: model.num_loads,
            ),
            on_open=lambda: self._prepare_update(config.execution),
        )

    def begin(self, plan: StepPlan) -> UnfinishedStep | StepResult | StepBroken:
        """Begin the step. The exit of another engine of the expert group breaks the step and leaves this worker
        intact."""
        if not self._memory.is_awake:
            raise RuntimeError(f"{plan.label} was planned for a worker that sleeps")
        if self._broken is None:
            try:
                return self._runner.begin(plan)
            except ExpertGroupBroken as error:
                self._broken = str(error)
                logger.debug("%s was not completed: %s", plan.label, error)
        return StepBroken(step=plan.step, cause=self._broken)

    def is_done(self, step: UnfinishedStep) -> bool:
        """Whether the step can be finished without waiting. It may never be done if an engine of the expert group has
        exited, so that is looked for."""
        if not step.is_done and self._broken is None and self.is_on_gpu:
            self._broken = self._groups.experts.check_processes()
        return step.is_done

    def finish(self, step: UnfinishedStep) -> StepResult | StageRoutedExperts | StepBroken | None:
        """Wait for the results of a step that has begun, and return this rank's report. The step is broken if its
        expert group has been broken since: the device may have computed it without the experts of that engine. A device
        that hangs is noticed by the engine, by the time limit of the step."""
        report = self._runner.finish(step)
        return report if self._broken is None else StepBroken(step=step.plan.step, cause=self._broken)

    def _wait_until_done(self, step: UnfinishedStep) -> None:
        """Wait for a step that the exit of another engine may keep from ending until its group is left."""
        if self.is_on_gpu and self._groups.experts.spans_engines:
            while not self.is_done(step):
                time.sleep(DEVICE_POLL_SECONDS)

    def open_expert_group(self, epoch: int, engines: EnginePosition | None) -> GroupOpened:
        self._broken = f"the group of epoch {epoch} that shares the experts is not joined yet"
        return self._groups.experts.open(epoch, engines)

    def join_expert_group(self, epoch: int, members: list[EngineOpened], leaving: list[int]) -> GroupJoined:
        """Join the group of the opened epoch, and exchange experts with the other ranks. The group may break meanwhile,
        because a member exits."""
        stage = [
            msgspec.structs.replace(member, opened=[member.opened[rank] for rank in self._tp_ranks])
            for member in members
        ]
        self._groups.experts.join(epoch, stage, timeout=JOIN_TIMEOUT_SECONDS)
        num_workers = len(self._tp_ranks)
        left = [
            position * num_workers + worker
            for position, rank in enumerate(sorted(member.rank for member in members))
            if rank in leaving
            for worker in range(num_workers)
        ]
        shortage: str | None = None
        try:
            shortage = self._model.on_group_formed(leaving=left, has_memory=self._memory.has_weights)
            self._broken = None
        except ExpertGroupBroken as error:
            self._broken = str(error)
        return GroupJoined(self._broken, shortage)

    def read_expert_load(self) -> WorkerExpertLoad:
        """Return the tokens that each expert has had, or an empty array if this rank reports none."""
        trace = self._model.trace if self._reports_load else None
        counts = np.zeros((0, 0), dtype=np.int64) if trace is None else trace.counts.cpu().numpy().copy()
        return WorkerExpertLoad(counts)

    def call_extension(self, method: str, arguments: bytes) -> ExtensionReturned:
        """Call a method of the worker extension. What it loads into the model does not reach a layer that drafts."""
        returned = self._extension.call(method, arguments)
        if returned.has_loaded_weights and isinstance(self._draft_model, DeepSeekDrafts):
            logger.warning(
                "the method `%s` has loaded weights: the layer for drafts stays as it is, and fewer of its proposals "
                "may be right; updates by a weight transfer have it, too",
                method,
            )
        return returned

    def transfer_weights(self, call: TransferCall) -> TransferReply:
        if isinstance(call, FetchStorage) and isinstance(self._draft_model, DeepSeekDrafts):
            logger.warning(
                "the weights of update %d come from another engine, without those of the layer for drafts: fewer of "
                "its proposals may be right until an update has it",
                call.number,
            )
        return self._weights.handle(call)

    def write_adapter(self, call: WriteAdapter) -> AdapterWritten:
        return write_adapter(self._model, call)

    def prepare_grammar(self, grammar: Grammar) -> GrammarPrepared:
        """Compile a grammar beside the steps, if this rank samples."""
        return GrammarPrepared(is_done=True) if self._grammars is None else self._grammars.prepare(grammar)

    def _prepare_update(self, execution: ExecutionConfig) -> None:
        """Request memory for new weights while steps go on."""
        if execution.weight_update == "staged" and self._memory.has_weights:
            prefault_chunks(self._model.updates.prepare(), read_free=host_free_bytes)

    def sleep(self, tags: Collection[SleepTag], level: int) -> int:
        """Return memory to the system, see `SleepableMemory.sleep`. No step must be unfinished."""
        self._prefaulter.close()  # before the cache sleeps, whose pages it would request
        if "weights" in tags:
            self._weights.on_weights_sleep(are_kept=level <= KEEPING_LEVEL)
        if self._draft_model is not None:
            self._draft_model.close()
        return self._memory.sleep(tags, level)

    def wake_up(self, tags: Collection[SleepTag]) -> WorkerWoke:
        """Take back memory, see `SleepableMemory.wake_up`. Steps can be taken when all parts are awake."""
        try:
            self._memory.wake_up(tags)
        except ConfigError as error:
            return WorkerWoke(Failure.of(error))
        if self._memory.has_weights:
            self._model.read_missing_experts()
        if self._memory.is_awake:
            self._prefaulter.close()
            self._prefaulter = CachePrefaulter(self._cache, self._runner)
        return WorkerWoke()

    def close(self) -> None:
        """Leave the groups."""
        self._weights.close()
        self._prefaulter.close()
        if self._grammars is not None:
            self._grammars.close()
        self._model.close()  # before the groups, see there
        if self._draft_model is not None:
            self._draft_model.close()
        self._groups.close()


def _grammars_of(loaded: LoadedWorker) -> WorkerGrammars | None:
    """Return the grammars of a rank that samples."""
    model, config = loaded.model, loaded.setup.config.model
    if not model.groups.is_sampling or model.spec.pools:
        return None
    check_backend(config.structured_outputs_backend)

    def load() -> GrammarCompiler:
        # loaded when first needed
        from eagleray.client.text.generation_config import model_eos_token_ids
        from eagleray.client.text.tokenizer import Tokenizer

        tokenizer, vocab_size = Tokenizer.load(tokenizer_dir(config)), model.spec.vocab_size
        ends = model_eos_token_ids(config) or tokenizer.eos_token_ids  # as the clients choose them
        return load_compiler(
            config.structured_outputs_backend,
            tokenizer.to_json(),
            vocab_size=vocab_size,
            eos_token_ids=[token_id for token_id in ends if token_id < vocab_size],
        )

    timeout = COMPILE_TIMEOUT_SECONDS + max_load_seconds(config.structured_outputs_backend)
    return WorkerGrammars(load, timeout=timeout)


def _pooler_of(loaded: LoadedWorker) -> Pooler | None:
    pooling = find_pooling(loaded.setup.config.model)
    return None if pooling is None else Pooler(loaded.model, pooling.method)


def _layout_facts(loaded: LoadedWorker) -> tuple[object, ...]:
    """Return everything that the layout of packed weights depends on, besides their sizes."""
    config, model, mesh = loaded.setup.config, loaded.model, loaded.mesh
    facts = (model.spec, model.dtype, model.kernels_name, model.device.type, mesh.rank, mesh.tp_size, mesh.pp_size)
    return (*facts, config.model.quantization, config.parallel)


class NullWorker:
    """State of a worker without a model: every row that could sample gets token 0.

    It serves to measure the cost of a step beside its computation (`eagleray bench rpc`).
    """

    def __init__(self, *, is_sampler: bool) -> None:
        self._is_sampler = is_sampler
        self._num_uncomputed: dict[int, int] = {}

    def step(self, plan: StepPlan) -> StepResult | None:
        for start in plan.new_rows:
            self._num_uncomputed[start.row] = len(start.token_ids) - start.num_computed_tokens
        rows = []
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            self._num_uncomputed[row] -= num_tokens
            if self._num_uncomputed[row] == 0:
                self._num_uncomputed[row] = 1
                rows.append(row)
        return StepResult(step=plan.step, rows=rows, token_ids=[0] * len(rows)) if self._is_sampler else None

    def close(self) -> None:
        """Do nothing, since nothing is open."""


def serve(worker: Worker, queue: MessageQueuePeer) -> None:
    """Handle calls until the engine closes the queue. For a worker with a process or Ray actor of its own."""
    calls: Codec[Call] = Codec(Call)
    replies: Codec[Reply] = Codec(Reply)
    try:
        while True:
            # The next step may arrive while the device computes one: it begins before that one is finished.
            frames = queue.receive(DEVICE_POLL_SECONDS if worker.has_unfinished else POLL_INTERVAL_SECONDS)
            if frames is None:
                ready = worker.finish_done()
            else:
                call = calls.decode(frames)
                ready = worker.handle(call)
                if isinstance(call.body, AllocateCache):  # the last call of the start
                    freeze_gc()
            for reply in ready:
                queue.send(replies.encode(reply), SEND_TIMEOUT_SECONDS)
    except ChannelClosed:
        return
