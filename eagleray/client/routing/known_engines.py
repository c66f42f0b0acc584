"""The engines that have joined, the ranks whose engines are starting, and the cause of a lack of both.

Pure; owned by the router.
"""

from __future__ import annotations

from collections.abc import Iterable

from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad


class KnownEngines:
    """The engines that this client may send to, each with its incarnation. `ranks`: those of the deployment."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        self.engines: dict[EngineId, EngineInfo] = {}
        """The engines that have joined, in that order."""
        self.stats: dict[EngineId, EngineStats] = {}
        """The latest statistics of each engine that has joined and sent some."""
        self.expert_load: dict[EngineId, ExpertLoad] = {}
        """The latest load of the experts of each engine that has joined and sent one."""
        self._early: dict[tuple[type, int], EngineStats | ExpertLoad] = {}
        """Reports that arrived before the `Joined` of their engine, by kind and rank."""
        self._cause: str | None = None
        self._starting = set(ranks)
        """Ranks whose engines are starting, for the first time or again."""
        self._given_up: dict[int, str] = {}
        """Causes, by rank, of the engines that will not return."""
        self._last_info: EngineInfo | None = None

    @property
    def expects_engines(self) -> bool:
        """Whether an engine is starting, for the first time or again."""
        return bool(self._starting)

    @property
    def cause(self) -> str | None:
        """Cause of the last exit if no engine is left, else None."""
        return None if self.engines else self._cause

    @property
    def info(self) -> EngineInfo | None:
        """The served model, also while its engines are starting again; None if nothing is served."""
        if self.engines:
            return next(iter(self.engines.values()))
        return self._last_info if self._starting else None

    @property
    def ranks(self) -> list[int]:
        """The ranks whose engines have joined or are starting, in order."""
        return sorted({engine.rank for engine in self.engines} | self._starting)

    def may_serve(self, rank: int | None) -> bool:
        """Whether there is, or will be, an engine of this rank; None: of any rank."""
        return bool(self.ranks) if rank is None else rank in self.ranks

    def given_up_cause(self, rank: int) -> str | None:
        """Return the reason why the engine of this rank will not return, or None if it has not been given up."""
        return self._given_up.get(rank)

    def engine_of_rank(self, rank: int) -> EngineId | None:
        """Return the newest engine of this rank that has joined, or None while the rank has none."""
        found = [engine for engine in self.engines if engine.rank == rank]
        return max(found, key=lambda engine: engine.incarnation, default=None)

    def add_engine(self, engine: EngineId, info: EngineInfo) -> None:
        self.engines[engine] = self._last_info = info
        self._starting.discard(engine.rank)
        self._given_up.pop(engine.rank, None)
        for kind in (EngineStats, ExpertLoad):
            early = self._early.pop((kind, engine.rank), None)
            if early is not None and early.engine == engine:
                self.record_report(early)

    def set_absent_info(self, info: EngineInfo) -> None:
        """Record the model that is served by engines that are starting again."""
        self._last_info = info

    def remove_engine(self, engine: EngineId, *, cause: str, will_restart: bool) -> None:
        """Remove an engine that exited. It may never have joined, if it failed while it started."""
        self.engines.pop(engine, None)
        self.stats.pop(engine, None)
        self.expert_load.pop(engine, None)
        self._cause = cause
        newest = self.engine_of_rank(engine.rank)
        if newest is not None and newest.incarnation > engine.incarnation:
            return  # the `Joined` of its replacement came before its own `Left`
        if will_restart:
            self._starting.add(engine.rank)
        else:
            self._starting.discard(engine.rank)
            self._given_up[engine.rank] = cause

    def remove_all(self, cause: str) -> None:
        """Remove all engines, and expect none."""
        self.engines.clear()
        self.stats.clear()
        self.expert_load.clear()
        self._starting.clear()
        self._cause = cause

    def record_report(self, report: EngineStats | ExpertLoad) -> None:
        """Record a report of an engine; it counts from the engine's `Joined` to its `Left`."""
        if report.engine not in self.engines:
            self._early[type(report), report.engine.rank] = report  # an idle engine sends no other
        elif isinstance(report, EngineStats):
            self.stats[report.engine] = report
        else:
            self.expert_load[report.engine] = report
