"""The engines that share experts, on their way to a group: who has opened for which epoch. Pure.

An epoch is formed when every rank has opened for it. It is over when one of those that have is lost, or finds it
broken; then the next one begins, for which all have to open. Owned by the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.identity import EngineId
from eagleray.messages.lifecycle import OpenExperts
from eagleray.messages.steps import EngineOpened


class ExpertRendezvous:
    """`ranks`: of the engines that it takes."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(ranks)
        self._opened: dict[int, tuple[EngineId, EngineOpened]] = {}
        self.epoch = 1

    @property
    def is_complete(self) -> bool:
        """All have opened for this epoch."""
        return len(self._opened) == len(self._ranks)

    @property
    def engines(self) -> list[EngineId]:
        """Those that have opened, in order of rank."""
        return [self._opened[rank][0] for rank in sorted(self._opened)]

    @property
    def members(self) -> list[EngineOpened]:
        """What they have opened, in the same order."""
        return [self._opened[rank][1] for rank in sorted(self._opened)]

    @property
    def call(self) -> OpenExperts:
        """What the engines are to do, while it is not complete."""
        return OpenExperts(self.epoch, [rank for rank in self._ranks if rank not in self._opened])

    def open(self, engine: EngineId, epoch: int, opened: EngineOpened) -> bool:
        """`engine` has opened. False: for an epoch that is over, of which it does not know yet."""
        if epoch < self.epoch:
            return False
        if epoch > self.epoch:
            self._begin(epoch)
        self._opened[engine.rank] = (engine, opened)
        return True

    def lose(self, engine: EngineId) -> None:
        """It is gone. If it had not opened, the others wait for its successor as they have waited for it."""
        if engine in self.engines:
            self._begin(self.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._opened.clear()
