"""Which engines there are, which are coming back, and why there is none. Pure; owned by the router."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad

Report = TypeVar("Report", EngineStats, ExpertLoad)


class LatestReports(Generic[Report]):
    """Of one kind, from engines: the newest of each one that is here."""

    def __init__(self) -> None:
        self.newest: dict[EngineId, Report] = {}
        self._early: dict[int, Report] = {}
        """By rank: one that was faster than the news that its engine has joined. An idle engine says no other."""

    def take(self, report: Report, *, is_here: bool) -> None:
        if is_here:
            self.newest[report.engine] = report
        else:
            self._early[report.engine.rank] = report

    def join(self, engine: EngineId) -> None:
        early = self._early.pop(engine.rank, None)
        if early is not None and early.engine == engine:
            self.newest[engine] = early

    def leave(self, engine: EngineId) -> None:
        self.newest.pop(engine, None)


class KnownEngines:
    """The engines that this client may speak to, each with its incarnation. `ranks`: those of the deployment."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.engines: dict[EngineId, EngineInfo] = {}
        """Those that have joined, in the order in which they did."""
        self._stats = LatestReports[EngineStats]()
        self._expert_load = LatestReports[ExpertLoad]()
        self._cause: str | None = None
        self._awaited = set(ranks)
        """Ranks whose engines are starting, for the first time or again."""
        self._given_up: dict[int, str] = {}
        """Causes by rank, of engines that will not come back."""
        self._last_info: EngineInfo | None = None

    @property
    def stats(self) -> dict[EngineId, EngineStats]:
        """The newest report of each of them that has sent one."""
        return self._stats.newest

    @property
    def expert_load(self) -> dict[EngineId, ExpertLoad]:
        """The same of how much their experts had to do; of models that have some."""
        return self._expert_load.newest

    @property
    def expects_engines(self) -> bool:
        """Whether an engine is starting, for the first time or again."""
        return bool(self._awaited)

    @property
    def cause(self) -> str | None:
        """Why there is no engine, if the last one has left."""
        return None if self.engines else self._cause

    @property
    def info(self) -> EngineInfo | None:
        """The served model, also while its engines are starting again; None if nothing is served."""
        if self.engines:
            return next(iter(self.engines.values()))
        return self._last_info if self._awaited else None

    @property
    def ranks(self) -> list[int]:
        """The ranks whose engines are here or starting, in order."""
        return sorted({engine.rank for engine in self.engines} | self._awaited)

    def why_given_up(self, rank: int) -> str | None:
        """Why the engine of this rank will not come back; None if it is here or starting, or there is no such rank."""
        return self._given_up.get(rank)

    def of_rank(self, rank: int) -> EngineId | None:
        """The engine of this rank; None while it is away."""
        found = [engine for engine in self.engines if engine.rank == rank]
        return max(found, key=lambda engine: engine.incarnation, default=None)

    def join(self, engine: EngineId, info: EngineInfo) -> None:
        self.engines[engine] = self._last_info = info
        self._awaited.discard(engine.rank)
        self._given_up.pop(engine.rank, None)
        self._stats.join(engine)
        self._expert_load.join(engine)

    def remember(self, info: EngineInfo) -> None:
        """Engines that are away serve this."""
        self._last_info = info

    def leave(self, engine: EngineId, *, cause: str, returns: bool) -> None:
        """`engine` is gone. It may never have joined: then it failed while it started."""
        self.engines.pop(engine, None)
        self._stats.leave(engine)
        self._expert_load.leave(engine)
        self._cause = cause
        newest = self.of_rank(engine.rank)
        if newest is not None and newest.incarnation > engine.incarnation:
            return  # its successor was faster than the news of its end
        if returns:
            self._awaited.add(engine.rank)
        else:
            self._awaited.discard(engine.rank)
            self._given_up[engine.rank] = cause

    def end(self, cause: str) -> None:
        """None is here, and none will come."""
        self.engines.clear()
        self.stats.clear()
        self.expert_load.clear()
        self._awaited.clear()
        self._cause = cause

    def report(self, report: EngineStats | ExpertLoad) -> None:
        """What an engine says of its load; it counts while the engine is here."""
        is_here = report.engine in self.engines
        match report:
            case EngineStats():
                self._stats.take(report, is_here=is_here)
            case ExpertLoad():
                self._expert_load.take(report, is_here=is_here)
