"""The engines that share experts with this one: when their group is formed, when it breaks, and what is said between.

A group has an epoch. The supervisor says for which epoch to open, and who is still missing; this engine's workers open,
and it says so; when all have, the supervisor says who they are, the workers join them, and from then on the engines
step together (`waves`). When an engine of the group is lost, a step breaks, or the supervisor says so: then the steps
in flight are dropped and planned anew, nothing else is lost, and the same begins again for the next epoch. Until it is
formed this engine steps no more; its loop goes on reading the inbox, so that requests wait and can be aborted.

Driven by the engine's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from eagleray.engine.core import EngineCore
from eagleray.engine.mailbox import SUPERVISOR, EngineOutbox
from eagleray.engine.waves import Waves
from eagleray.errors import DeadlineExceeded, ExpertGroupBroken
from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import EngineStarted, ExpertsFormed, ExpertsOpened, OpenExperts
from eagleray.messages.steps import EngineOpened, ExpertGroupOpened, GroupsJoined, JoinExpertGroup, OpenExpertGroup
from eagleray.messages.waves import WaveStarted
from eagleray.scheduler.request import AddressedChunk

logger = get_logger(__name__)


class EngineStepper(Protocol):
    """When the loop's engine steps."""

    @property
    def is_busy(self) -> bool:
        """There is a step to take, or one to wait for."""

    def step(self, announce: Callable[[list[AddressedChunk]], None]) -> list[AddressedChunk]:
        """As `EngineCore.step`."""

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        """News of the engines that share experts."""


class IndependentStepper:
    """Whenever it has work."""

    def __init__(self, core: EngineCore) -> None:
        self._scheduler = core.scheduler
        self.step = core.step

    @property
    def is_busy(self) -> bool:
        return self._scheduler.has_work

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        logger.warning("dropped a %s: this engine shares its experts with nobody", type(message).__name__)


class ExpertGroupMember:
    """When the others do. `started`: what the supervisor is told when the first group is formed; `leave_seconds`: in
    which workers come back from a step that the loss of another engine has broken, or this one ends itself;
    `join_seconds`: what all may take to join when all are there; `patience`: for how long it is waited without any news
    of those that are missing."""

    def __init__(
        self,
        started: EngineStarted,
        core: EngineCore,
        waves: Waves,
        outbox: EngineOutbox,
        *,
        leave_seconds: float,
        join_seconds: float,
        patience: float,
    ) -> None:
        self._engine = started.engine
        self._started: EngineStarted | None = started
        self._core = core
        self._waves = waves
        self._outbox = outbox
        self._leave_seconds = leave_seconds
        self._join_seconds = join_seconds
        self._patience = patience
        self._epoch = 0  # that this engine has opened for; 0: none yet
        self._others: list[EngineId] = []
        """That it has joined."""
        self._is_formed = False
        self._missing: list[int] = []
        self._waits_since = self._heard_at = time.monotonic()

    @property
    def is_busy(self) -> bool:
        return self._is_formed and (self._core.scheduler.has_work or self._waves.is_on or self._waves.is_called)

    def step(self, announce: Callable[[list[AddressedChunk]], None]) -> list[AddressedChunk]:
        """Raises `DeadlineExceeded` if the group is not formed in time, or a worker does not come back from a step that
        was broken."""
        if not self._is_formed:
            self._check_patience()
            return []
        if self._waves.begin(has_work=self._core.scheduler.has_work):
            for other in self._others:
                self._outbox.send(other, WaveStarted(self._engine, self._epoch, self._waves.wave))
        try:
            return self._core.step(announce)
        except ExpertGroupBroken:
            self._open(self._epoch + 1)
            return []

    def handle(self, message: OpenExperts | ExpertsFormed | WaveStarted) -> None:
        match message:
            case OpenExperts(epoch, missing):
                if epoch > self._epoch:
                    self._open(epoch)
                self._missing, self._heard_at = missing, time.monotonic()
            case ExpertsFormed(epoch):
                if epoch == self._epoch and not self._is_formed:
                    self._join(message)
            case WaveStarted(_, epoch, wave):
                self._waves.hear(epoch, wave)

    def _open(self, epoch: int) -> None:
        """Leave the group of an earlier epoch, whatever it was in the middle of, and be there for the next one."""
        if self._is_formed or self._epoch == 0:
            self._waits_since = time.monotonic()
        if self._is_formed:
            logger.info("an engine that shares experts with this one is gone: waits for its successor")
        self._leave()
        self._epoch = epoch
        executor = self._core.executor
        try:
            opened = executor.call(OpenExpertGroup(epoch), ExpertGroupOpened, timeout=self._leave_seconds)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(f"workers do not leave the group of an engine that is gone: {error}") from error
        self._heard_at = time.monotonic()
        where = EngineOpened(rank=self._engine.rank, topology=executor.topology, opened=opened)
        self._outbox.send(SUPERVISOR, ExpertsOpened(self._engine, epoch, where))

    def _leave(self) -> None:
        self._is_formed = False
        for other in self._others:
            self._outbox.disconnect(other)
        self._others = []
        self._core.drop_steps()

    def _join(self, formed: ExpertsFormed) -> None:
        """If one is gone again by now, the first step will say so."""
        call = JoinExpertGroup(formed.epoch, formed.members)
        self._core.executor.call(call, GroupsJoined, timeout=self._join_seconds)
        for joined in formed.engines:
            if isinstance(joined.member, EngineId) and joined.member != self._engine:
                self._outbox.connect(joined.member, joined.address)
                self._others.append(joined.member)
        self._waves.form(formed.epoch)
        self._is_formed = True
        seconds = time.monotonic() - self._waits_since
        names = ", ".join(other.label for other in self._others)
        logger.info("shares experts with %s (epoch %d, after %.1f s)", names, formed.epoch, seconds)
        if self._started is not None:
            self._outbox.send(SUPERVISOR, self._started)
            self._started = None

    def _check_patience(self) -> None:
        now = time.monotonic()
        if now - self._heard_at > self._patience:
            awaited = f"engine {', '.join(map(str, self._missing))}" if self._missing else "the supervisor"
            raise DeadlineExceeded(
                f"{self._engine.label} has waited {now - self._waits_since:.0f} s for the engines that share experts "
                f"with it (epoch {self._epoch}); {awaited} was not heard of for {now - self._heard_at:.0f} s"
            )
