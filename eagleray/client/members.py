"""Which engines there are, which are coming back, and why there is none. Pure; owned by the router."""

from __future__ import annotations

from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats

__all__ = ["Members"]


class Members:
    """The engines that this client may speak to, each with its incarnation."""

    def __init__(self) -> None:
        self.engines: dict[EngineId, EngineInfo] = {}
        """Those that have joined, in the order in which they did."""
        self.stats: dict[EngineId, EngineStats] = {}
        """The newest report of each of them that has sent one."""
        self._early: dict[int, EngineStats] = {}
        """By rank: a report that was faster than the news that its engine has joined. An idle engine says no other."""
        self._cause: str | None = None
        self._awaited: set[int] = set()
        """Ranks of the engines that are coming back."""
        self._last_info: EngineInfo | None = None

    @property
    def expects_engines(self) -> bool:
        """An engine has left and returns."""
        return bool(self._awaited)

    @property
    def cause(self) -> str | None:
        """Why there is no engine, if the last one has left."""
        return None if self.engines else self._cause

    @property
    def info(self) -> EngineInfo | None:
        """What is served, also while the engines that served it are coming back; None if nothing is."""
        if self.engines:
            return next(iter(self.engines.values()))
        return self._last_info if self._awaited else None

    @property
    def ranks(self) -> list[int]:
        """The ranks of those that are here or coming back, in order."""
        return sorted({engine.rank for engine in self.engines} | self._awaited)

    def of_rank(self, rank: int) -> EngineId | None:
        """The engine of this rank; None while it is away."""
        found = [engine for engine in self.engines if engine.rank == rank]
        return max(found, key=lambda engine: engine.incarnation, default=None)

    def join(self, engine: EngineId, info: EngineInfo) -> None:
        self.engines[engine] = self._last_info = info
        self._awaited.discard(engine.rank)
        early = self._early.pop(engine.rank, None)
        if early is not None and early.engine == engine:
            self.stats[engine] = early

    def remember(self, info: EngineInfo) -> None:
        """Engines that are away serve this."""
        self._last_info = info

    def leave(self, engine: EngineId, *, cause: str, returns: bool) -> None:
        """`engine` is gone. It may never have joined: then it failed while it started."""
        self.engines.pop(engine, None)
        self.stats.pop(engine, None)
        self._cause = cause
        newest = self.of_rank(engine.rank)
        if newest is not None and newest.incarnation > engine.incarnation:
            return  # its successor was faster than the news of its end
        if returns:
            self._awaited.add(engine.rank)
        else:
            self._awaited.discard(engine.rank)

    def end(self, cause: str) -> None:
        """None is here, and none will come."""
        self.engines.clear()
        self.stats.clear()
        self._awaited.clear()
        self._cause = cause

    def report(self, stats: EngineStats) -> None:
        """What an engine says of its load; it counts while the engine is here."""
        if stats.engine in self.engines:
            self.stats[stats.engine] = stats
        else:
            self._early[stats.engine.rank] = stats
