"""Workers and wires in memory for the tests of the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from eagleray.errors import WorkerLost
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.steps import (
    AdapterWritten,
    AllocateCache,
    Call,
    CallDone,
    CallExtension,
    ExtensionReturned,
    GroupJoined,
    JoinGroup,
    LoadModel,
    MeasureMemory,
    MemoryMeasured,
    ModelLoaded,
    OpenGroup,
    ReadExpertLoad,
    Reply,
    SleepWorker,
    StepBroken,
    StepPlan,
    StepResult,
    WakeWorker,
    WorkerExpertLoad,
    WorkerReply,
    WorkerSlept,
    WorkerWoke,
    WriteAdapter,
)
from eagleray.messages.weight_transfer import (
    ApplyUpdate,
    CheckUpdate,
    CloseTransfer,
    DropUpdate,
    PollTransfer,
    ReceiveTensors,
    StartUpdate,
    TransferDone,
    TransferProgress,
    UpdateApplied,
    UpdateChecked,
)
from eagleray.messages.workers import GroupOpened, Topology

ENGINE = EngineId("i", 0)


class CountingGroup:
    """A worker whose model generates the number of tokens in the row: 5, 6, 7, … after a prompt of 5."""

    topology = Topology(tensor_parallel_size=1, pipeline_parallel_size=1, nodes=["here"], addresses=["127.0.0.1"])

    def __init__(self, *, max_model_len: int = 100, available_bytes: int = 10_000, top_k: int = 0) -> None:
        self.max_model_len = max_model_len
        self.available_bytes = available_bytes
        self.top_k = top_k
        self.calls: list[Any] = []
        self.known: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.fails_at_step: int | None = None
        self.dies_at_step: int | None = None
        self.breaks_at_step: int | None = None
        """Another engine of its group is gone then."""
        self.broken_epochs: list[int] = []
        """In which somebody is gone before all have joined."""
        self.is_broken = False
        self.on_step: Callable[[int], None] = lambda step: None
        """Called with the number of each step before it is computed."""
        self.wake_failure: Failure | None = None
        """Cause for which memory cannot be allocated again."""
        self.returned = ExtensionReturned(value=b"")
        """Reply to calls of the worker extension."""
        self.works_for_others: Callable[[StepPlan], bool] = lambda plan: False
        self.has_staged = False
        """Whether it has received weights for every update."""
        self.num_polls = 0
        """Number of times that it is asked before tensors have come."""
        self.adapter_failures: dict[str, Failure] = {}
        """Causes for which adapters cannot be loaded, by path."""
        self.digests: dict[str, str] = {}
        """Hashes of adapters that are not `d`, by path."""
        self._replies: deque[Reply] = deque()

    def send(self, call: Call) -> None:
        self.calls.append(call.body)
        if isinstance(call.body, StepPlan) and call.body.step == self.dies_at_step:
            raise WorkerLost("the worker died")
        self._replies.append(Reply(call.call_id, 0, self._answer(call.body)))

    def receive(self, timeout: float) -> Reply | None:
        return self._replies.popleft() if self._replies else None

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _answer(self, body: Any) -> WorkerReply:
        match body:
            case OpenGroup("engine"):
                return GroupOpened()
            case JoinGroup("engine"):
                return CallDone()
            case LoadModel():
                return ModelLoaded(
                    architecture="Counting",
                    num_parameters=1,
                    vocab_size=1000,
                    max_model_len=self.max_model_len,
                    bytes_per_block=100,
                    device="cpu",
                    kernels="TorchBackend",
                    num_moe_layers=2 if self.top_k else 0,
                    num_experts=4 if self.top_k else 0,
                    top_k=self.top_k,
                )
            case MeasureMemory():
                return MemoryMeasured(self.available_bytes)
            case AllocateCache():
                return CallDone()
            case OpenGroup("expert"):
                return GroupOpened(store=f"store of epoch {body.epoch}")
            case JoinGroup("expert"):
                self.is_broken = body.epoch in self.broken_epochs
                return GroupJoined("engine-1 is gone" if self.is_broken else None)
            case ReadExpertLoad():
                return WorkerExpertLoad(np.full((2, 4), sum(self.known.values()), np.int64))
            case SleepWorker(tags=tags):
                return WorkerSlept(1000 * len(tags))
            case WakeWorker():
                return WorkerWoke(self.wake_failure)
            case WriteAdapter(path=path):
                failure = self.adapter_failures.get(path)
                return AdapterWritten(digest=self.digests.get(path, "d"), failure=failure)
            case StartUpdate() | DropUpdate() | CloseTransfer():
                return TransferDone()
            case ReceiveTensors():
                return TransferProgress(is_done=False)
            case PollTransfer():
                self.num_polls -= 1
                return TransferProgress(is_done=self.num_polls <= 0, num_tensors=3, num_bytes=30)
            case CheckUpdate():
                return UpdateChecked(missing=["up"])
            case ApplyUpdate():
                return UpdateApplied(self.has_staged)
            case CallExtension():
                return self.returned
            case StepPlan():
                self.on_step(body.step)
                return self._step(body)
        raise AssertionError(body)

    def _step(self, plan: StepPlan) -> WorkerReply:
        if plan.step == self.fails_at_step:
            cause = Failure(kind="RuntimeError", message="the worker broke")
            return Ended(WorkerId(ENGINE), cause)
        self.is_broken |= plan.step == self.breaks_at_step
        if self.is_broken:
            return StepBroken(step=plan.step, cause="engine-1 is gone")
        for start in plan.new_rows:
            self.known[start.row] = len(start.token_ids)
            self.computed[start.row] = start.num_computed_tokens
        rows, token_ids = [], []
        for row, count in zip(plan.rows, plan.num_tokens, strict=True):
            self.computed[row] += count
            if self.computed[row] == self.known[row]:
                rows.append(row)
                token_ids.append(self.known[row])
                self.known[row] += 1
        works = not plan.is_idle or self.works_for_others(plan)
        return StepResult(step=plan.step, rows=rows, token_ids=token_ids, any_engine_busy=works)


class ListInbox:
    """Inbox with the messages and exceptions of a test; `on_empty` is called when they are used up."""

    address = "list"

    def __init__(self, *messages: Any) -> None:
        self.messages = deque(messages)
        self.on_empty: Callable[[], Any] | None = None

    def receive(self, timeout: float | None) -> Any:
        if self.messages:
            message = self.messages.popleft()
            if isinstance(message, Exception):
                raise message
            return message
        if timeout is None or timeout > 0:
            assert self.on_empty is not None, "the engine waits, but the test has nothing more to say"
            return self.on_empty()
        return None


class ListOutbox:
    """Outbox that records (peer, message) in the order of sending."""

    def __init__(self) -> None:
        self.peers: dict[Any, str] = {}
        self.broken: list[Any] = []
        self.sent: list[tuple[Any, Any]] = []
        self.on_send: Callable[[Any], Any] = lambda message: None
        """Called with every message."""

    def connect(self, peer: Any, address: str) -> None:
        self.peers[peer] = address

    def disconnect(self, peer: Any) -> None:
        self.peers.pop(peer, None)

    def pop_broken(self) -> list[Any]:
        broken, self.broken = self.broken, []
        return broken

    def send(self, peer: Any, message: Any) -> None:
        self.sent.append((peer, message))
        self.on_send(message)
