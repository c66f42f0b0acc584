"""The rendezvous at which engines that share experts form their group: which engine has opened for which epoch. Pure.

An epoch has a set of ranks, and its group is formed when every rank has opened for it. When one of those engines exits
or finds the group broken, or engines are added or removed, the next epoch begins, and all ranks have to open for it.
Owned by the supervisor.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.identity import EngineId
from eagleray.messages.lifecycle import ExpertsFormed, OpenExperts
from eagleray.messages.membership import Joined
from eagleray.messages.workers import EngineOpened


class ExpertRendezvous:
    """`ranks` are the data-parallel ranks of all engines of the first group."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self.epoch = 1
        self.ranks = sorted(ranks)
        """Ranks of the engines of this epoch."""
        self.leaving: list[int] = []
        """Ranks that are about to leave; the others take over their experts."""
        self.shortage: str | None = None
        """Why an engine cannot take over the experts of engines that were to leave, which then keep them; else None."""
        self.has_changed = False
        """Whether the ranks have ever changed, so that the experts are not where they were at the start."""
        self._opened: dict[int, tuple[EngineId, EngineOpened]] = {}
        self._joined: set[int] = set()

    @property
    def is_complete(self) -> bool:
        """Whether all ranks have opened for this epoch."""
        return len(self._opened) == len(self.ranks)

    @property
    def is_settled(self) -> bool:
        """Whether all ranks have joined the group of this epoch, and have their experts."""
        return len(self._joined) == len(self.ranks)

    @property
    def engines(self) -> list[EngineId]:
        """Engines that have opened, in order of rank."""
        return [self._opened[rank][0] for rank in sorted(self._opened)]

    @property
    def open_message(self) -> OpenExperts:
        """Message to the engines while the group is not complete."""
        return OpenExperts(self.epoch, self.ranks, [rank for rank in self.ranks if rank not in self._opened])

    def formed_message(self, engines: list[Joined]) -> ExpertsFormed:
        """Return the message to the engines when the group is complete. `engines`: their addresses, in order of
        rank."""
        members = [self._opened[rank][1] for rank in self.ranks]
        return ExpertsFormed(self.epoch, engines, members, self.leaving)

    def open(self, engine: EngineId, epoch: int, opened: EngineOpened) -> bool:
        """Record that `engine` has opened. Returns False for another epoch, and for a rank outside of the group."""
        if epoch != self.epoch or engine.rank not in self.ranks:
            return False
        self._opened[engine.rank] = engine, opened
        return True

    def join(self, engine: EngineId, epoch: int, shortage: str | None = None) -> None:
        """Record that `engine` has joined the group. `shortage`: what it lacks for the experts of those that leave."""
        if epoch == self.epoch and engine in self.engines:
            self._joined.add(engine.rank)
            if shortage is not None:
                self.shortage, self.leaving = f"{engine.label}: {shortage}", []

    def mark_broken(self, engine: EngineId, epoch: int) -> bool:
        """Begin the next epoch, because `engine` found the group of this one broken. False for an earlier epoch."""
        if epoch != self.epoch or engine not in self.engines:
            return False
        self._begin()
        return True

    def remove(self, engine: EngineId, *, returns: bool = True) -> None:
        """Record that `engine` exited. The others wait for its replacement if it `returns`, else they form a group
        without it."""
        if not returns and engine.rank in self.ranks:
            self.regroup(
                [rank for rank in self.ranks if rank != engine.rank],
                leaving=[rank for rank in self.leaving if rank != engine.rank],
            )
        elif engine in self.engines:
            self._begin()

    def regroup(self, ranks: Iterable[int], *, leaving: Iterable[int] = ()) -> None:
        """Begin the next epoch with other ranks, of which those in `leaving` give their experts to the others."""
        self.ranks, self.leaving = sorted(ranks), sorted(leaving)
        self.has_changed, self.shortage = True, None
        self._begin()

    def _begin(self) -> None:
        self.epoch += 1
        self._opened.clear()
        self._joined.clear()
