"""The engine loop: one inbox, one outbox, one `match`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from eagleray.engine.control import EngineControl
from eagleray.engine.core import EngineCore
from eagleray.engine.early_requests import EarlyRequests
from eagleray.engine.grammars import EngineGrammars
from eagleray.engine.mailbox import EngineInbox, EngineMessage, EngineOutbox
from eagleray.engine.timeouts import (
    EXPERT_LOAD_INTERVAL_SECONDS,
    FLUSH_SECONDS,
    GRAMMAR_POLL_SECONDS,
    IDLE_POLL_SECONDS,
    STATS_INTERVAL_SECONDS,
    TRANSFER_POLL_SECONDS,
)
from eagleray.errors import EngineFailed, InvalidRequest
from eagleray.identity import SUPERVISOR, ClientId, EngineId, SupervisorId
from eagleray.log import get_logger
from eagleray.messages.control import Command, InstanceState
from eagleray.messages.lifecycle import Attach, ExpertsFormed, OpenExperts, Stop, Unreachable
from eagleray.messages.membership import Joined, Left
from eagleray.messages.outputs import Chunk, EngineStats, ExpertLoad, FinishReason
from eagleray.messages.requests import Abort, CallWorkers, Generate
from eagleray.messages.waves import WaveStarted
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs

logger = get_logger(__name__)


class EngineStepper(Protocol):
    """Decides when the engine of a loop steps."""

    @property
    def is_busy(self) -> bool:
        """Whether a step can be taken or is in flight."""

    def step(self, send_early: Callable[[list[AddressedChunk]], None]) -> StepOutputs:
        """See `EngineCore.step`."""

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        """Handle a message about the expert group."""


class IndependentStepper:
    """Steps whenever the engine has work."""

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        self.step = core.step

    @property
    def is_busy(self) -> bool:
        return self._scheduler.has_work

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        logger.warning("dropped a %s: this engine belongs to no expert group", type(message).__name__)


class ExpertLoadReporter:
    """Reports the load of the experts every few seconds while the engine works, and when it becomes idle."""

    def __init__(self, engine: EngineId, core: EngineCore) -> None:
        self._engine = engine
        self._core = core
        self._due = math.inf

    def report_soon(self) -> None:
        """Make the next report due at once, because a new client has not received the last one."""
        self._due = 0.0

    def report(self, *, is_idle: bool) -> ExpertLoad | None:
        """Return the load, or None if no report is due or nothing was computed since the last one."""
        now = time.monotonic()
        if self._due == math.inf and not is_idle:  # work has begun
            self._due = now + EXPERT_LOAD_INTERVAL_SECONDS
        if now < self._due and not (is_idle and self._due < math.inf):
            return None
        self._due = math.inf if is_idle else now + EXPERT_LOAD_INTERVAL_SECONDS
        return ExpertLoad(engine=self._engine, counts=self._core.read_expert_load())


class EngineLoop:
    """Runs until `Stop` arrives or a step raises.

    `stepper` is given for an engine of an expert group. With `has_experts`, clients receive the load of the experts.
    `host`: see `EngineWeightUpdate`. `update`: number of the weight update that the weights of the checkpoint count as.
    """

    def __init__(
        self,
        engine: EngineId,
        core: EngineCore,
        inbox: EngineInbox,
        outbox: EngineOutbox,
        *,
        stepper: EngineStepper | None = None,
        has_experts: bool = False,
        host: str | None = None,
        update: int = 0,
    ) -> None:
        self._engine = engine
        self._core = core
        self._stepper = stepper or IndependentStepper(core)
        self._expert_load = ExpertLoadReporter(engine, core) if has_experts else None
        self._inbox = inbox
        self._outbox = outbox
        self._clients: set[ClientId] = set()
        self._control = EngineControl(
            engine,
            core,
            publish=self._publish,
            reply=lambda done: outbox.send(SUPERVISOR, done),
            host=host,
            update=update,
        )
        self._early_requests = EarlyRequests()
        self._grammars = EngineGrammars(core)
        self._stopping = False
        self._stats_due = 0.0
        self._has_reported_idle = False

    def run(self) -> None:
        while not self._stopping:
            self._handle_messages()
            self._execute_commands()
            if self._core.scheduler.has_unprepared_grammars or self._grammars.asked:
                self._publish(self._grammars.advance(self._send_early))
            self._publish_step(self._stepper.step(self._send_early))
            self._execute_commands()  # the step may have been the last that a command waits for
            self._report()

    def adopt(self, state: InstanceState, *, timeout: float) -> None:
        """Start in this state, within `timeout` seconds."""
        self._control.adopt(state, timeout=timeout)

    def join(self, member: Joined) -> None:
        """Connect to a new client and handle its requests that arrived before this message."""
        if isinstance(member.member, ClientId):
            self._clients.add(member.member)
            self._outbox.connect(member.member, member.address)
            self._stats_due = 0.0
            if self._expert_load is not None:
                self._expert_load.report_soon()
            for request in self._early_requests.pop(member.member):
                self._handle(request)

    def _handle_messages(self) -> None:
        """Handle every message that has arrived. An idle engine waits for one and checks its workers meanwhile."""
        is_idle = not self._stepper.is_busy
        message = self._receive(self._idle_seconds if is_idle else 0)
        if is_idle:
            self._core.executor.check()
            self._check_connections()
        while message is not None:
            self._handle(message)
            message = self._receive(0)
        if (now := time.monotonic()) > self._early_requests.next_expiry:
            for client in self._early_requests.expire(now):
                logger.warning("%s: dropped its requests, because the client has not joined", client.label)

    def _check_connections(self) -> None:
        """Report clients that cannot be reached, because chunks for them may be lost and they would wait for ever."""
        for peer in self._outbox.pop_broken():
            if isinstance(peer, SupervisorId):
                raise EngineFailed("the connection to the supervisor broke")
            self._outbox.send(SUPERVISOR, Unreachable(self._engine, peer))

    def _receive(self, timeout: float) -> EngineMessage | None:
        """Receive the next message. Malformed ones are dropped: a foreign client must not crash the engine."""
        while True:
            try:
                return self._inbox.receive(timeout)
            except msgspec.MsgspecError as error:
                logger.warning("dropped a malformed message: %s", error)

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case (Generate() | CallWorkers()) as request if request.client not in self._clients:
                self._early_requests.keep(request, time.monotonic())
            case Generate():
                self._add(message)
            case CallWorkers(client=client):
                self._outbox.send(client, self._core.call_workers(message))
            case Abort(client, request_ids):
                self._early_requests.abort(client, request_ids)
                self._publish(self._core.scheduler.abort(client, request_ids))
            case Joined():
                self.join(message)
            case Left(ClientId() as client):
                self._clients.discard(client)
                self._early_requests.pop(client)
                self._outbox.disconnect(client)
                self._core.scheduler.abort_client(client)
            case OpenExperts() | ExpertsFormed() | WaveStarted():
                self._stepper.handle(message)
            case Stop():
                self._stopping = True
            case Command():
                self._control.add(message, time.monotonic())
            case Left() | Attach():
                pass  # the stepper handles the engines of its expert group; this engine is attached already

    @property
    def _idle_seconds(self) -> float:
        """Time for which an idle engine waits for a message."""
        if self._core.scheduler.has_unprepared_grammars:
            return GRAMMAR_POLL_SECONDS
        return TRANSFER_POLL_SECONDS if self._control.tasks else IDLE_POLL_SECONDS

    def _execute_commands(self) -> None:
        if self._control.tasks and self._control.advance(time.monotonic()):
            self._stats_due = 0.0

    def _add(self, request: Generate) -> None:
        try:
            self._core.scheduler.add(request)
        except InvalidRequest as error:
            chunk = Chunk(
                request_id=request.request_id,
                finish_reason=FinishReason.ERROR,
                error=str(error),
                is_user_error=True,
            )
            self._publish([AddressedChunk(request.client, chunk)])

    def _send_early(self, chunks: list[AddressedChunk]) -> None:
        """Send chunks that must arrive even if the next step crashes this process."""
        self._publish(chunks)
        time.sleep(FLUSH_SECONDS)

    def _publish(self, chunks: list[AddressedChunk]) -> None:
        self._publish_step(StepOutputs.of(chunks))

    def _publish_step(self, outputs: StepOutputs) -> None:
        for client, message in outputs.messages(self._engine).items():
            self._outbox.send(client, message)

    def _report(self) -> None:
        """Send the load to every client: at intervals, when work begins, and when the engine becomes idle."""
        scheduler, now = self._core.scheduler, time.monotonic()
        is_idle = not (scheduler.has_work or scheduler.num_requests)
        if now < self._stats_due and is_idle == self._has_reported_idle:
            return
        self._check_connections()
        self._stats_due = math.inf if is_idle else now + STATS_INTERVAL_SECONDS
        self._has_reported_idle = is_idle
        stats = EngineStats(engine=self._engine, **msgspec.structs.asdict(scheduler.stats()))
        for client in self._clients:
            self._outbox.send(client, stats)
        if self._expert_load is not None and (load := self._expert_load.report(is_idle=is_idle)) is not None:
            for client in self._clients:
                self._outbox.send(client, load)
