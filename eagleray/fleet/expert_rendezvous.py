"""The rendezvous at which engines that share experts form their group: which engine has opened for which epoch. Pure.

The group of an epoch is formed when every rank has opened for it. When one of those engines exits, or finds the group
broken, the next epoch begins, and all ranks have to open for it. Owned by the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.identity import EngineId
from eagleray.messages.lifecycle import OpenExperts
from eagleray.messages.workers import EngineOpened


class ExpertRendezvous:
    """`ranks` are the data-parallel ranks of all engines of the group."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = sorted(ranks)
        self._opened: dict[int, tuple[EngineId, EngineOpened]] = {}
        self.epoch = 1

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have opened for this epoch."""
        return len(self._opened) == len(self._ranks)

    @property
    def engines(self) -> list[EngineId]:
        """Engines that have opened, in order of rank."""
        return [self._opened[rank][0] for rank in sorted(self._opened)]

    @property
    def members(self) -> list[EngineOpened]:
        """Addresses that those engines have opened, in the same order."""
        return [self._opened[rank][1] for rank in sorted(self._opened)]

    @property
    def open_message(self) -> OpenExperts:
        """Message to the engines while the group is not complete."""
        return OpenExperts(self.epoch, [rank for rank in self._ranks if rank not in self._opened])

    def open(self, engine: EngineId, epoch: int, opened: EngineOpened) -> bool:
        """Record that `engine` has opened. False for an earlier epoch, which the engine does not know to be over."""
        if epoch < self.epoch:
            return False
        if epoch > self.epoch:
            self._begin(epoch)
        self._opened[engine.rank] = (engine, opened)
        return True

    def remove(self, engine: EngineId) -> None:
        """Record that `engine` exited. If it had not opened, the others simply wait for its replacement."""
        if engine in self.engines:
            self._begin(self.epoch + 1)

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._opened.clear()
