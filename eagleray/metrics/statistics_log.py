"""A line of statistics in the log while there is work: load of the engines, tokens per second, use of the cache.

Driven by one API server of the instance, which receives the stats of all engines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from eagleray.identity import EngineId
from eagleray.log import get_logger
from eagleray.messages.outputs import EngineStats

logger = get_logger(__name__)

INTERVAL_SECONDS = 10.0


class _Totals(NamedTuple):
    """Counters of one engine, or their increase over an interval."""

    num_prompt_tokens: int = 0
    """Tokens of prompts, computed or found in the prefix cache."""
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


class StatisticsLog:
    """Logs a line every ten seconds in which engines had work. `stats` returns the newest stats of every engine."""

    def __init__(self, stats: Callable[[], Iterable[EngineStats]], now: float) -> None:
        self._stats = stats
        self._since = now
        self._before: dict[EngineId, _Totals] | None = None

    def tick(self, now: float) -> None:
        """Log a line if it is time. Called once a second or more often; `now`: seconds of any steady clock."""
        if self._before is None:  # counts of the time before this server started have no rate
            self._before = {stats.engine: _totals(stats) for stats in self._stats()}
        elif now - self._since >= INTERVAL_SECONDS:
            self._log(now)

    def _log(self, now: float) -> None:
        engines = list(self._stats())
        before, self._before = self._before or {}, {stats.engine: _totals(stats) for stats in engines}
        seconds, self._since = now - self._since, now
        changes = [
            [count - old for count, old in zip(totals, before.get(engine, _Totals()), strict=True)]
            for engine, totals in self._before.items()
        ]
        change = _Totals(*map(sum, zip(*changes, strict=True)))
        num_running = sum(stats.num_running for stats in engines)
        num_waiting = sum(stats.num_waiting for stats in engines)
        if not (num_running or num_waiting or any(change)):
            return
        num_blocks = sum(stats.num_kv_blocks for stats in engines)
        num_free_blocks = sum(stats.num_free_kv_blocks for stats in engines)
        logger.info(
            "%d running, %d waiting; tokens/s: %.1f in, %.1f out; KV cache %.1f %%, prefix hits %.1f %%",
            num_running,
            num_waiting,
            change.num_prompt_tokens / seconds,
            change.num_generation_tokens / seconds,
            100 * (num_blocks - num_free_blocks) / max(1, num_blocks),
            100 * change.num_prefix_hits / max(1, change.num_prefix_queries),
        )


def _totals(stats: EngineStats) -> _Totals:
    return _Totals(
        stats.num_prompt_tokens + stats.num_prefix_hits,
        stats.num_generation_tokens,
        stats.num_prefix_queries,
        stats.num_prefix_hits,
    )
