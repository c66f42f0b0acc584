"""The engines that a client knows, and the choice of one for each request.

Pure: no clock, no socket; randomness is passed in. The engine is chosen in this order: the rank that the request names;
the rank that its session belongs to; the engine that probably has the longest part of its prompt in its prefix cache,
unless that engine has far more requests than others; the least loaded one. The load from other clients is known only
from time to time, and equally to all clients: if each filled the engine that it sees empty, together they would fill it
several times over. So each evens out a fraction of the imbalance, equal to its fraction of all requests; where that
leaves a choice, the better one of two random engines gets the request (Mitzenmacher, 2001).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from eagleray.client.routing.recent_blocks import PrefixMatch, RecentBlocks, block_hashes
from eagleray.errors import InvalidRequest, Unavailable
from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats, ExpertLoad

RANK_HEADER = "X-data-parallel-rank"
"""HTTP header that names a rank; `param` of the error for a wrong one."""

MAX_BLOCKS = 2**14
"""Most blocks that are remembered of an engine, however large its cache is."""

OVERLOAD_FACTOR = 1.5
OVERLOAD_REQUESTS = 4
"""An engine gets no request because of its cache if it has `OVERLOAD_FACTOR` times as many requests as the least loaded
engine, and `OVERLOAD_REQUESTS` more."""

LEAST_FRACTION = 0.25
"""Least fraction of the imbalance that a client evens out: one with few requests also avoids engines with many."""


class KnownEngines:
    """The engines that have joined, the ranks whose engines are starting, and the cause of a lack of both.

    `ranks`: those of the deployment.
    """

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
        self._removed: dict[int, str] = {}
        """Causes, by rank, of the engines that have left for good on purpose."""
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
        engines = tuple(self.engines)  # a copy, because other threads ask too
        return sorted({engine.rank for engine in engines} | self._starting)

    @property
    def deployed_ranks(self) -> list[int]:
        """The ranks of the deployment, in order: `ranks`, and those whose engines were given up."""
        return sorted({*self.ranks, *self._given_up})

    def may_serve(self, rank: int | None) -> bool:
        """Whether there is, or will be, an engine of this rank; None: of any rank."""
        return bool(self.ranks) if rank is None else rank in self.ranks

    def given_up_cause(self, rank: int) -> str | None:
        """Return the reason why the engine of this rank will not return, or None if it has not been given up."""
        return self._given_up.get(rank)

    def removal_cause(self, rank: int) -> str | None:
        """Return the reason why the rank was removed on purpose, or None if it was not."""
        return self._removed.get(rank)

    def engine_of_rank(self, rank: int) -> EngineId | None:
        """Return the newest engine of this rank that has joined, or None while the rank has none."""
        found = [engine for engine in self.engines if engine.rank == rank]
        return max(found, key=lambda engine: engine.incarnation, default=None)

    def add_engine(self, engine: EngineId, info: EngineInfo) -> None:
        self.engines[engine] = self._last_info = info
        self._starting.discard(engine.rank)
        self._given_up.pop(engine.rank, None)
        self._removed.pop(engine.rank, None)
        for kind in (EngineStats, ExpertLoad):
            early = self._early.pop((kind, engine.rank), None)
            if early is not None and early.engine == engine:
                self.record_report(early)

    def set_absent_info(self, info: EngineInfo) -> None:
        """Record the model that is served by engines that are starting again."""
        self._last_info = info

    def remove_engine(self, engine: EngineId, *, cause: str, will_restart: bool, is_planned: bool = False) -> None:
        """Remove an engine that left. It may never have joined, if it failed while it started."""
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
            self._given_up.pop(engine.rank, None)
            (self._removed if is_planned else self._given_up)[engine.rank] = cause

    def remove_all(self, cause: str) -> None:
        """Remove all engines, and expect none."""
        self._given_up |= dict.fromkeys(self.ranks, cause)
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


class RoutingDecision(NamedTuple):
    """The engine for a request."""

    engine: EngineId
    hashes: list[int]
    """Names of the blocks of its prompt; empty if they make no difference."""


@dataclass(slots=True)
class _EngineLoad:
    """Load and cache of an engine, as far as the router knows them."""

    blocks: RecentBlocks
    block_size: int
    num_ours: int = 0
    """Completions of this client that are in flight there."""
    num_others: int = 0
    """Completions of other clients, by the engine's last report."""
    update: int = 0
    """Number of the last weight update that the engine has applied, by its last report."""
    cache_usage: float = 0.0
    """Fraction of the cache blocks in use, by the engine's last report."""

    @property
    def num_total(self) -> int:
        return self.num_ours + self.num_others


class Router:
    """`match_prefixes` False: the engines have no prefix cache. `ranks`: see `KnownEngines`."""

    def __init__(self, *, rng: random.Random, match_prefixes: bool = True, ranks: Iterable[int] = ()) -> None:
        self.known_engines = KnownEngines(ranks)
        self._rng = rng
        self._match_prefixes = match_prefixes
        self._loads: dict[EngineId, _EngineLoad] = {}
        self._draining: set[EngineId] = set()
        """Engines that are going to leave, and get new requests only where there is no other engine."""

    def add_engine(self, engine: EngineId, info: EngineInfo) -> None:
        self.known_engines.add_engine(engine, info)
        self._loads[engine] = _EngineLoad(RecentBlocks(min(info.num_kv_blocks, MAX_BLOCKS)), info.block_size)

    def remove_engine(self, engine: EngineId, *, cause: str, will_restart: bool, is_planned: bool = False) -> None:
        """Forget an engine that left, and the blocks in its cache. `is_planned`: whether it was told to go."""
        self.known_engines.remove_engine(engine, cause=cause, will_restart=will_restart, is_planned=is_planned)
        self._loads.pop(engine, None)
        self._draining.discard(engine)

    def drain(self, engine: EngineId) -> None:
        """Choose the engine from now on only for requests that name its rank, or if there is no other."""
        if engine in self._loads:
            self._draining.add(engine)

    def is_drained(self, engine: EngineId) -> bool:
        """Whether the engine drains and has none of our requests."""
        return engine in self._draining and self._loads[engine].num_ours == 0

    def remove_all(self, cause: str) -> None:
        """Forget all engines, and expect none."""
        self.known_engines.remove_all(cause)
        self._loads.clear()
        self._draining.clear()

    def record_stats(self, stats: EngineStats) -> None:
        """Record an engine's load. The part that is not ours belongs to others, and counts until the next report."""
        self.known_engines.record_report(stats)
        if load := self._loads.get(stats.engine):
            load.num_others = max(0, stats.num_running + stats.num_waiting - load.num_ours)
            load.update = stats.update
            load.cache_usage = 1 - stats.num_free_kv_blocks / max(1, stats.num_kv_blocks)

    def choose(
        self,
        token_ids: Sequence[int],
        *,
        cache_salt: str = "",
        adapter: int = 0,
        session: str | None = None,
        rank: int | None = None,
    ) -> RoutingDecision | None:
        """Return the engine for a request with this prompt, or None if the request has to wait for an engine to join.

        Raises `InvalidRequest` for a rank that does not exist or was removed, and `Unavailable` for one that was given
        up.
        """
        hashes = self._hashes(token_ids, cache_salt, adapter)
        if rank is not None:
            engine = self._engine_of_rank(rank)
        elif not self._loads:
            engine = None
        elif session is not None:
            home = rendezvous_hash(session, {engine.rank for engine in self._open_loads})
            engine = self.known_engines.engine_of_rank(home)
        else:
            engine = self._best(hashes)
        return None if engine is None else RoutingDecision(engine, hashes)

    def record_sent(self, decision: RoutingDecision, count: int = 1) -> PrefixMatch:
        """Record that a request with `count` completions was sent to the engine of the decision."""
        load = self._loads[decision.engine]
        load.num_ours += count
        return load.blocks.use(decision.hashes)

    def record_started(self, engine: EngineId, match: PrefixMatch, num_cached_tokens: int | None) -> None:
        """Record how many prompt tokens the engine found in its cache; None: the request finished without a report."""
        if load := self._loads.get(engine):
            if num_cached_tokens is None:
                load.blocks.drop(match)
            else:
                load.blocks.confirm(match, num_cached_tokens // load.block_size)

    def record_finished(self, engine: EngineId, count: int = 1) -> None:
        """Record that `count` of our completions have left the engine."""
        if load := self._loads.get(engine):
            load.num_ours -= count

    def num_requests(self, engine: EngineId) -> int:
        """Return the number of completions in flight on an engine: ours, and those of others as far as known."""
        return self._loads[engine].num_total

    def _hashes(self, token_ids: Sequence[int], cache_salt: str, adapter: int) -> list[int]:
        """Return the names of the prompt's blocks; none where there is nothing to choose by them."""
        if not self._match_prefixes or (len(self._loads) < 2 and not self.known_engines.expects_engines):
            return []
        load = next(iter(self._loads.values()), None)
        if load is None:
            return []
        # Engines apply an update at almost the same time: an engine that has not yet will soon drop its cached blocks.
        update = max(other.update for other in self._loads.values())
        return block_hashes(
            token_ids, block_size=load.block_size, cache_salt=cache_salt, update=update, adapter=adapter
        )

    def _engine_of_rank(self, rank: int) -> EngineId | None:
        if (cause := self.known_engines.given_up_cause(rank)) is not None:
            raise Unavailable(f"data-parallel rank {rank} is not served any more: {cause}")
        if not self.known_engines.may_serve(rank):
            removed = self.known_engines.removal_cause(rank)
            gone = "" if removed is None else f" any more ({removed})"
            raise InvalidRequest(
                f"there is no data-parallel rank {rank!r}{gone}: the ranks of this deployment are "
                f"{format_ranks(self.known_engines.ranks)}",
                param=RANK_HEADER,
            )
        return self.known_engines.engine_of_rank(rank)

    @property
    def _open_loads(self) -> dict[EngineId, _EngineLoad]:
        """The engines that requests without a rank may go to."""
        if not self._draining:
            return self._loads
        return {engine: load for engine, load in self._loads.items() if engine not in self._draining} or self._loads

    def _best(self, hashes: list[int]) -> EngineId:
        loads = self._open_loads
        lengths = {engine: load.blocks.match(hashes) for engine, load in loads.items()} if hashes else {}
        if longest := max(lengths.values(), default=0):
            least = min(load.num_total for load in loads.values())
            holders = [engine for engine, length in lengths.items() if length == longest]
            if fit := [engine for engine in holders if not _is_overloaded(self._loads[engine].num_total, least)]:
                return self._better_of_two(fit)
        return self._less_loaded()

    def _less_loaded(self) -> EngineId:
        """Return the engine that should get the next of our requests."""
        loads = self._open_loads
        num_ours = sum(load.num_ours for load in loads.values())
        num_total = sum(load.num_total for load in loads.values())
        fraction = max(LEAST_FRACTION, num_ours / num_total) if num_total else 1.0
        scores = {engine: load.num_ours + fraction * load.num_others for engine, load in loads.items()}
        least = min(scores.values())
        return self._better_of_two([engine for engine, score in scores.items() if score < least + 1])

    def _better_of_two(self, engines: list[EngineId]) -> EngineId:
        pair = self._rng.sample(engines, min(2, len(engines)))
        return min(pair, key=lambda engine: (self._loads[engine].num_total, self._loads[engine].cache_usage))


def rendezvous_hash(session: str, ranks: Iterable[int]) -> int:
    """Return the rank that a session belongs to.

    It is the same for every client that knows these ranks, and when one rank is removed only its sessions move (highest
    random weight, Thaler and Ravishankar, 1998).
    """
    return max(ranks, key=lambda rank: (blake2b(f"{rank}/{session}".encode(), digest_size=8).digest(), rank))


def _is_overloaded(num_requests: int, least: int) -> bool:
    return num_requests > OVERLOAD_FACTOR * least and num_requests >= least + OVERLOAD_REQUESTS


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ranges such as `0-2, 5` for 0, 1, 2 and 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
