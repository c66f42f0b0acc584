"""The engine process's loop: one inbox, one outbox, one `match`."""

from __future__ import annotations

import math
import time
from collections import defaultdict

import msgspec

from eagleray.engine.core import EngineCore
from eagleray.engine.early_requests import EarlyRequests
from eagleray.engine.expert_group_member import EngineStepper, IndependentStepper
from eagleray.engine.expert_load import ExpertLoadReporter
from eagleray.engine.mailbox import SUPERVISOR, EngineInbox, EngineMessage, EngineOutbox
from eagleray.errors import EngineFailed, InvalidRequest
from eagleray.identity import ClientId, EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import Attach, ExpertsFormed, OpenExperts, Stop, Unreachable
from eagleray.messages.membership import Joined, Left
from eagleray.messages.outputs import Chunk, Chunks, EngineStats, FinishReason
from eagleray.messages.requests import Abort, CallWorkers, Generate
from eagleray.messages.waves import WaveStarted
from eagleray.scheduler.request import AddressedChunk

logger = get_logger(__name__)

STATS_SECONDS = 0.5
"""While it works, an engine reports its load this often; and always when it falls idle."""

IDLE_SECONDS = 0.25
"""While it waits for requests, an engine looks this often whether its workers are still there."""

LEAVE_SECONDS = 0.01
"""What a message gets to leave this process, when the next thing it does may be its last."""


class EngineLoop:
    """Runs until `Stop` arrives or a step raises. `pace`: of an engine that does not step by itself alone;
    `has_experts`: its clients are told how busy they are."""

    def __init__(
        self,
        engine: EngineId,
        core: EngineCore,
        inbox: EngineInbox,
        outbox: EngineOutbox,
        *,
        pace: EngineStepper | None = None,
        has_experts: bool = False,
    ) -> None:
        self._engine = engine
        self._core = core
        self._pace = pace or IndependentStepper(core)
        self._expert_load = ExpertLoadReporter(engine, core) if has_experts else None
        self._inbox = inbox
        self._outbox = outbox
        self._clients: set[ClientId] = set()
        self._strangers = EarlyRequests()
        self._stopping = False
        self._stats_due = 0.0
        self._has_reported_idle = False

    def run(self) -> None:
        while not self._stopping:
            self._take()
            self._publish(self._pace.step(self._announce))
            self._report()

    def join(self, member: Joined) -> None:
        """A client can be answered from now on. Its requests may have overtaken this news: they were kept."""
        if isinstance(member.member, ClientId):
            self._clients.add(member.member)
            self._outbox.connect(member.member, member.address)
            self._stats_due = 0.0
            if self._expert_load is not None:
                self._expert_load.renew()
            for request in self._strangers.take(member.member):
                self._handle(request)

    def _take(self) -> None:
        """Handle every message that has arrived; without a step to take, wait for one, with an eye on the workers."""
        is_idle = not self._pace.is_busy
        message = self._receive(IDLE_SECONDS if is_idle else 0)
        if is_idle:
            self._core.executor.check()
            self._check_connections()
        while message is not None:
            self._handle(message)
            message = self._receive(0)
        for client in self._strangers.expire(time.monotonic()):
            logger.warning("%s has asked for something, but did not join: forgotten", client.label)

    def _check_connections(self) -> None:
        """Who cannot be reached must not wait for ever for what was sent."""
        for peer in self._outbox.take_broken():
            if isinstance(peer, str):
                raise EngineFailed("the connection to the supervisor broke")
            self._outbox.send(SUPERVISOR, Unreachable(self._engine, peer))

    def _receive(self, timeout: float) -> EngineMessage | None:
        """Clients may be programs of others: what they say by mistake must not end the engine for everybody."""
        while True:
            try:
                return self._inbox.receive(timeout)
            except msgspec.MsgspecError as error:
                logger.warning("dropped something that is no message to an engine: %s", error)

    def _handle(self, message: EngineMessage) -> None:
        match message:
            case (Generate() | CallWorkers()) as request if request.client not in self._clients:
                self._strangers.keep(request, time.monotonic())
            case Generate():
                self._add(message)
            case CallWorkers(client=client):
                self._outbox.send(client, self._core.call_workers(message))
            case Abort(client, request_ids):
                self._strangers.abort(client, request_ids)
                self._publish(self._core.scheduler.abort(client, request_ids))
            case Joined():
                self.join(message)
            case Left(ClientId() as client):
                self._clients.discard(client)
                self._strangers.take(client)
                self._outbox.disconnect(client)
                self._core.scheduler.abort_client(client)
            case OpenExperts() | ExpertsFormed() | WaveStarted():
                self._pace.handle(message)
            case Stop():
                self._stopping = True
            case Left() | Attach():
                pass  # engines that concern this one are its company's to know, and it is attached already

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

    def _announce(self, outputs: list[AddressedChunk]) -> None:
        """To be known even if the step that comes next ends this process."""
        self._publish(outputs)
        time.sleep(LEAVE_SECONDS)

    def _publish(self, outputs: list[AddressedChunk]) -> None:
        by_client: dict[ClientId, list[Chunk]] = defaultdict(list)
        for client, chunk in outputs:
            by_client[client].append(chunk)
        for client, chunks in by_client.items():
            self._outbox.send(client, Chunks(self._engine, chunks))

    def _report(self) -> None:
        """Tell every client the load: now and then, when work begins, and when there is nothing left to do."""
        scheduler, now = self._core.scheduler, time.monotonic()
        is_idle = not scheduler.has_work
        if now < self._stats_due and is_idle == self._has_reported_idle:
            return
        self._check_connections()
        self._stats_due = math.inf if is_idle else now + STATS_SECONDS
        self._has_reported_idle = is_idle
        stats = EngineStats(engine=self._engine, **msgspec.structs.asdict(scheduler.stats()))
        for client in self._clients:
            self._outbox.send(client, stats)
        if self._expert_load is not None and (load := self._expert_load.report(is_idle=is_idle)) is not None:
            for client in self._clients:
                self._outbox.send(client, load)
