"""Membership of an engine in an expert group: forming the group, leaving it when it breaks, forming the next one.

A group has an epoch. The supervisor sends the epoch to open, its engines, and those that are still missing; this
engine's workers open, and the engine reports it; when all have, the supervisor sends the members, the workers join them
and exchange experts, and from then on the engines step together (`waves`). When an engine of the group exits, a step
breaks, and this engine reports it. The supervisor then opens the next epoch, as it does when engines are added or
removed. The steps in flight are dropped and planned anew, nothing else is lost, and the next group is formed in
the same way. Until then this engine takes no steps; its loop still reads the inbox, so that requests are queued and can
be aborted.

Driven by the engine loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from eagleray.engine.core import EngineCore
from eagleray.engine.mailbox import EngineOutbox
from eagleray.engine.waves import Waves
from eagleray.errors import DeadlineExceeded, ExpertGroupBroken
from eagleray.identity import SUPERVISOR, EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import (
    EngineStarted,
    ExpertsBroken,
    ExpertsFormed,
    ExpertsJoined,
    ExpertsOpened,
    OpenExperts,
)
from eagleray.messages.steps import GroupJoined, JoinGroup, OpenGroup
from eagleray.messages.waves import WaveStarted
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs

logger = get_logger(__name__)


class ExpertGroupMember:
    """Steps together with the other engines of the group.

    `started` is sent to the supervisor when the first group is formed. Time limits: `leave_seconds` for workers to
    return from a step that was broken by the exit of another engine (then this engine exits), `join_seconds` for all
    workers to join, `missing_seconds` without any update on the engines that are missing."""

    def __init__(
        self,
        started: EngineStarted,
        core: EngineCore,
        waves: Waves,
        outbox: EngineOutbox,
        *,
        leave_seconds: float,
        join_seconds: float,
        missing_seconds: float,
    ) -> None:
        self._engine = started.engine
        self._started: EngineStarted | None = started
        self._core = core
        self._waves = waves
        self._outbox = outbox
        self._leave_seconds = leave_seconds
        self._join_seconds = join_seconds
        self._missing_seconds = missing_seconds
        self._epoch = 0  # the epoch that this engine has opened; 0: none yet
        self._others: list[EngineId] = []
        """Engines whose group this one has joined."""
        self._is_formed = False
        self._ranks: list[int] = []
        """Ranks of the engines of the epoch."""
        self._missing: list[int] = []
        self._waits_since = self._updated_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        return self._is_formed and (self._core.scheduler.has_work or self._waves.is_on or self._waves.is_requested)

    def step(self, send_early: Callable[[list[AddressedChunk]], None]) -> StepOutputs:
        """Take a step with the group, if it is formed.

        Raises `DeadlineExceeded` if the group is not formed in time, or a worker does not return from a broken step.
        """
        if not self._is_formed:
            self._check_missing_engines()
            return StepOutputs()
        if self._waves.maybe_start(has_work=self._core.scheduler.has_work):
            for other in self._others:
                self._outbox.send(other, WaveStarted(self._engine, self._epoch, self._waves.wave))
        try:
            return self._core.step(send_early)
        except ExpertGroupBroken:
            logger.info("%s: another engine left its expert group: waiting for the next group", self._engine.label)
            self._report_broken()
            return StepOutputs()

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        match message:
            case OpenExperts(epoch, ranks, missing):
                if epoch > self._epoch:
                    self._open(epoch, ranks)
                self._missing, self._updated_at = missing, time.monotonic()
            case ExpertsFormed(epoch):
                if epoch == self._epoch and not self._is_formed:
                    self._join(message)
            case WaveStarted(_, epoch, wave):
                self._waves.on_wave_started(epoch, wave)

    def _open(self, epoch: int, ranks: list[int]) -> None:
        """Leave the group of an earlier epoch, even in the middle of a step, and open the next epoch."""
        if self._epoch == 0:
            self._waits_since = time.monotonic()
        if self._is_formed:
            logger.info("%s: its expert group is formed anew, of the engines %s", self._engine.label, ranks)
        self._leave()
        self._epoch, self._ranks = epoch, ranks
        executor = self._core.executor
        try:
            opened = executor.call(OpenGroup("expert", epoch, ranks), GroupOpened, timeout=self._leave_seconds)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"workers do not leave the group of an exited engine: {error}") from error
        self._updated_at = time.monotonic()
        where = EngineOpened(rank=self._engine.rank, topology=executor.topology, opened=opened)
        self._outbox.send(SUPERVISOR, ExpertsOpened(self._engine, epoch, where))

    def _report_broken(self) -> None:
        self._leave()
        self._updated_at = time.monotonic()
        self._outbox.send(SUPERVISOR, ExpertsBroken(self._engine, self._epoch))

    def _leave(self) -> None:
        if self._is_formed:
            self._waits_since = time.monotonic()
        self._is_formed = False
        for other in self._others:
            self._outbox.disconnect(other)
        self._others = []
        self._core.drop_steps()

    def _join(self, formed: ExpertsFormed) -> None:
        """Join the members, unless one of them exits meanwhile."""
        call = JoinGroup("expert", formed.epoch, formed.members, formed.leaving)
        joined_workers = self._core.executor.call(call, GroupJoined, timeout=self._join_seconds)
        if any(worker.broken is not None for worker in joined_workers):
            self._report_broken()
            return
        for joined in formed.engines:
            if isinstance(joined.member, EngineId) and joined.member != self._engine:
                self._outbox.connect(joined.member, joined.address)
                self._others.append(joined.member)
        self._waves.form(formed.epoch)
        self._is_formed = True
        seconds = time.monotonic() - self._waits_since
        names = ", ".join(other.label for other in self._others) or "no other engine"
        logger.info("expert group formed with %s (epoch %d, after %.2f s)", names, formed.epoch, seconds)
        shortage = next((worker.shortage for worker in joined_workers if worker.shortage is not None), None)
        self._outbox.send(SUPERVISOR, ExpertsJoined(self._engine, formed.epoch, shortage))
        if self._started is not None:
            self._outbox.send(SUPERVISOR, self._started)
            self._started = None

    def _check_missing_engines(self) -> None:
        now = time.monotonic()
        if self._epoch == 0:  # the supervisor decides when an added engine joins the group
            return
        if now - self._updated_at > self._missing_seconds:
            awaited = f"engine {', '.join(map(str, self._missing))}" if self._missing else "the supervisor"
            raise DeadlineExceeded(
                f"{self._engine.label} waited {now - self._waits_since:.0f} s for its expert group "
                f"(epoch {self._epoch}): {awaited} is missing, no update for {now - self._updated_at:.0f} s"
            )
