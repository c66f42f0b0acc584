"""A worker: one device of an engine, which handles the engine's calls, each in the state that it fits.

Driven by an executor's worker group. An exception leaves `handle` as an `Ended` reply, never as an exception.
"""

from __future__ import annotations

import msgspec
import numpy as np

from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, ExpertGroupBroken, InvalidRequest
from eagleray.identity import WorkerId
from eagleray.kernels.kv_cache import KVCache
from eagleray.log import get_logger
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.steps import (
    AllocateCache,
    Call,
    CallDone,
    CallExtension,
    EngineOpened,
    ExtensionReturned,
    GroupOpened,
    JoinGroup,
    LoadModel,
    LoadNullModel,
    MeasureMemory,
    MemoryMeasured,
    OpenGroup,
    ReadExpertLoad,
    Reply,
    StageRoutedExperts,
    StepBroken,
    StepPlan,
    StepResult,
    WorkerCall,
    WorkerExpertLoad,
    WorkerReply,
)
from eagleray.messages.workers import Topology
from eagleray.parallel.mesh import Mesh
from eagleray.process.gc_freeze import freeze_gc
from eagleray.transport.message_queue_peer import MessageQueuePeer
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.prefault import CachePrefaulter
from eagleray.worker.runner import Runner
from eagleray.worker.sampling_state import SamplingState
from eagleray.worker.startup import JoinedWorker, LoadedWorker, OpenedWorker, WorkerSetup
from eagleray.worker.timeouts import JOIN_TIMEOUT_SECONDS, POLL_INTERVAL_SECONDS, SEND_TIMEOUT_SECONDS

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

    def handle(self, call: Call) -> Reply | None:
        """Handle `call` and return the reply. It is None if another rank reports the result of the step, or if this
        worker has failed before: then its state is unknown and it ignores all calls."""
        if self._has_failed:
            return None
        try:
            body = self._handle(call.body)
        except Exception as error:
            self._has_failed = True
            body = Ended(self._setup.worker, Failure.of(error))
        return None if body is None else Reply(call.call_id, self.rank, body)

    def close(self) -> None:
        """Release the resources of the current state and leave the groups."""
        self._state.close()

    def _handle(self, body: WorkerCall) -> WorkerReply | None:
        state = self._state
        match state, body:
            case ((ServingWorker() | NullWorker()), StepPlan()):
                return state.step(body)
            case ServingWorker(), CallExtension(method, arguments):
                return state.call_extension(method, arguments)
            case ServingWorker(), ReadExpertLoad():
                return state.read_expert_load()
            case ServingWorker(), OpenGroup("expert", epoch):
                return state.open_expert_group(epoch)
            case ServingWorker(), JoinGroup("expert", epoch, members):
                state.join_expert_group(epoch, members)
            case WorkerSetup(), OpenGroup("engine"):
                self._state = opened = OpenedWorker(state)
                return opened.opened
            case OpenedWorker(), JoinGroup("engine", _, [engine]):
                self._state = state.join(engine.opened)
            case JoinedWorker(), LoadModel():
                self._state = loaded = LoadedWorker(state)
                return loaded.describe()
            case LoadedWorker(), MeasureMemory(max_num_batched_tokens):
                return MemoryMeasured(state.available_bytes(max_num_batched_tokens))
            case LoadedWorker(), AllocateCache(num_blocks):
                self._state = ServingWorker(state, num_blocks)
            case ((WorkerSetup() | NullWorker()), LoadNullModel()):
                self._state = NullWorker(is_sampler=self._setup.mesh.is_sampler)
            case _:
                raise RuntimeError(f"{type(body).__name__} is not a call for the state {type(state).__name__}")
        return CallDone()


class ServingWorker:
    """Last state: the cache is allocated, so the worker takes steps.

    A worker of an expert group takes none from the moment its group is left until it has joined the next one.
    """

    def __init__(self, loaded: LoadedWorker, num_blocks: int) -> None:
        model, config = loaded.model, loaded.setup.config
        num_rows, block_size = config.scheduling.max_num_seqs, config.cache.block_size
        self._model = model
        self._groups = loaded.groups
        self._tp_ranks = loaded.mesh.tp_ranks
        # Ranks that compute the same tokens count the same, so only the first of them reports.
        self._reports_load = model.trace is not None and (loaded.mesh.tp_rank == 0 or model.has_sequence_shards)
        self._extension = loaded.extension
        self._broken: str | None = None  # cause why no step can be taken, until an expert group is joined
        cache = KVCache.allocate(
            model.cache_shape(block_size), num_blocks=num_blocks, dtype=model.dtype, device=model.device
        )
        self._runner = Runner(
            model,
            cache,
            InputBatch(num_rows=num_rows, max_model_len=loaded.max_model_len, block_size=block_size),
            SamplingState(num_rows=num_rows, vocab_size=model.spec.vocab_size, device=model.device),
        )
        self._prefaulter = CachePrefaulter(cache, self._runner)

    def step(self, plan: StepPlan) -> StepResult | StageRoutedExperts | StepBroken | None:
        """Take the step. The exit of another engine of the expert group breaks the step and leaves this worker
        intact."""
        if self._broken is None:
            try:
                return self._runner.step(plan)
            except ExpertGroupBroken as error:
                self._broken = str(error)
                logger.warning("%s was not completed: %s", plan.label, error)
        return StepBroken(step=plan.step, cause=self._broken)

    def open_expert_group(self, epoch: int) -> GroupOpened:
        self._broken = f"the group of epoch {epoch} that shares the experts is not joined yet"
        return self._groups.experts.open(epoch)

    def join_expert_group(self, epoch: int, members: list[EngineOpened]) -> None:
        """Join the group of the opened epoch. If a member has exited by now, the next step reports it."""
        stage = [
            msgspec.structs.replace(member, opened=[member.opened[rank] for rank in self._tp_ranks])
            for member in members
        ]
        self._groups.experts.join(epoch, stage, timeout=JOIN_TIMEOUT_SECONDS)
        try:
            self._model.on_group_formed()
            self._broken = None
        except ExpertGroupBroken as error:
            self._broken = str(error)

    def read_expert_load(self) -> WorkerExpertLoad:
        """Return the tokens that each expert has had, or an empty array if this rank reports none."""
        trace = self._model.trace if self._reports_load else None
        counts = np.zeros((0, 0), dtype=np.int64) if trace is None else trace.counts.cpu().numpy().copy()
        return WorkerExpertLoad(counts)

    def call_extension(self, method: str, arguments: bytes) -> ExtensionReturned:
        if self._extension is None:
            message = "no worker extension: set the option `worker_extension_cls` to `module:Class`"
            return ExtensionReturned(failure=Failure.of(InvalidRequest(message)))
        return self._extension.call(method, arguments)

    def close(self) -> None:
        """Leave the groups."""
        self._prefaulter.close()
        self._groups.close()


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
            frames = queue.receive(POLL_INTERVAL_SECONDS)
            if frames is None:
                continue
            call = calls.decode(frames)
            reply = worker.handle(call)
            if reply is not None:
                queue.send(replies.encode(reply), SEND_TIMEOUT_SECONDS)
            if isinstance(call.body, AllocateCache):  # the last call of the start
                freeze_gc()
    except ChannelClosed:
        return
