"""Which engine a request goes to. Pure: no clock, no socket; chance is handed in.

In this order: the rank that the request names; the rank that its session belongs to; the engine that probably has the
longest part of its prompt in its prefix cache, unless that one has far more to do than others; the one with the least
to do. What others have sent there is known only from time to time, and all clients know the same: would each fill what
it sees empty, together they would fill it several times. So each evens out its share of what is uneven, as large as its
share of all requests; where that leaves a choice, it takes the better one of two that chance proposes (Mitzenmacher,
2001).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from eagleray.client.routing.known_engines import KnownEngines
from eagleray.client.routing.recent_blocks import PrefixMatch, RecentBlocks, block_hashes
from eagleray.errors import InvalidRequest, Unavailable
from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats

RANK_HEADER = "X-data-parallel-rank"
"""How users name a rank over HTTP; what a wrong one is reported as."""

MAX_BLOCKS = 2**14
"""Blocks that are remembered of an engine, however large its cache is."""

OVERLOAD_FACTOR = 1.5
OVERLOAD_REQUESTS = 4
"""An engine with so many times, and so many, more requests than the least loaded one gets none for its cache's sake."""


LEAST_SHARE = 0.25
"""Who has few requests still keeps away from engines that have many."""


class RoutingDecision(NamedTuple):
    """Where a request shall go."""

    engine: EngineId
    hashes: list[int]
    """Of its prompt's blocks, if they matter."""


class SentRequest(NamedTuple):
    """A request that has gone there."""

    engine: EngineId
    use: PrefixMatch


@dataclass(slots=True)
class _Engine:
    """What the router knows of an engine that is here."""

    blocks: RecentBlocks
    block_size: int
    num_ours: int = 0
    """Completions of this client that are in flight there."""
    num_others: int = 0
    """Those of other clients, by its last report."""
    cache_use: float = 0.0
    """Part of its cache blocks that are in use, by its last report."""

    @property
    def load(self) -> int:
        return self.num_ours + self.num_others


class Router:
    """`match_prefixes` False: the engines have no prefix cache. `ranks`: see `KnownEngines`."""

    def __init__(self, *, rng: random.Random, match_prefixes: bool = True, ranks: Iterable[int] = ()) -> None:
        self.members = KnownEngines(ranks)
        self._rng = rng
        self._match_prefixes = match_prefixes
        self._engines: dict[EngineId, _Engine] = {}

    def join(self, engine: EngineId, info: EngineInfo) -> None:
        self.members.join(engine, info)
        self._engines[engine] = _Engine(RecentBlocks(min(info.num_kv_blocks, MAX_BLOCKS)), info.block_size)

    def leave(self, engine: EngineId, *, cause: str, returns: bool) -> None:
        """Forget it, and what was in its cache."""
        self.members.leave(engine, cause=cause, returns=returns)
        self._engines.pop(engine, None)

    def end(self, cause: str) -> None:
        """No engine is here, and none will come."""
        self.members.end(cause)
        self._engines.clear()

    def report(self, stats: EngineStats) -> None:
        """An engine's load. What of it is not ours belongs to others, and stays until the next report."""
        self.members.report(stats)
        if engine := self._engines.get(stats.engine):
            engine.num_others = max(0, stats.num_running + stats.num_waiting - engine.num_ours)
            engine.cache_use = 1 - stats.num_free_kv_blocks / max(1, stats.num_kv_blocks)

    def choose(
        self, token_ids: Sequence[int], *, cache_salt: str = "", session: str | None = None, rank: int | None = None
    ) -> RoutingDecision | None:
        """Where a request with this prompt shall go; None: nowhere now, it must wait for an engine to join.

        Raises `InvalidRequest` for a rank that does not exist, and `Unavailable` for one that was given up.
        """
        hashes = self._hashes(token_ids, cache_salt)
        if rank is not None:
            engine = self._of_rank(rank)
        elif not self._engines:
            engine = None
        elif session is not None:
            engine = self.members.of_rank(rendezvous_hash(session, {engine.rank for engine in self._engines}))
        else:
            engine = self._best(hashes)
        return None if engine is None else RoutingDecision(engine, hashes)

    def sent(self, choice: RoutingDecision, count: int = 1) -> SentRequest:
        """A request has gone there, with so many completions."""
        engine = self._engines[choice.engine]
        engine.num_ours += count
        return SentRequest(choice.engine, engine.blocks.use(choice.hashes))

    def started(self, sending: SentRequest, num_cached_tokens: int | None) -> None:
        """It computes: so many tokens of the prompt were found in its cache; None: it did not tell."""
        if engine := self._engines.get(sending.engine):
            if num_cached_tokens is None:
                engine.blocks.drop(sending.use)
            else:
                engine.blocks.confirm(sending.use, num_cached_tokens // engine.block_size)

    def ended(self, engine: EngineId, count: int = 1) -> None:
        """So many of our completions are no longer there."""
        if known := self._engines.get(engine):
            known.num_ours -= count

    def load(self, engine: EngineId) -> int:
        """Completions in flight on an engine that is here: ours, and those of others as far as known."""
        return self._engines[engine].load

    def _hashes(self, token_ids: Sequence[int], cache_salt: str) -> list[int]:
        """None where there is nothing to choose by them."""
        if not self._match_prefixes or (len(self._engines) < 2 and not self.members.expects_engines):
            return []
        engine = next(iter(self._engines.values()), None)
        return block_hashes(token_ids, block_size=engine.block_size, cache_salt=cache_salt) if engine else []

    def _of_rank(self, rank: int) -> EngineId | None:
        ranks = self.members.ranks
        if (cause := self.members.why_given_up(rank)) is not None:
            raise Unavailable(f"data-parallel rank {rank} is not served any more: {cause}")
        if rank not in ranks:
            raise InvalidRequest(
                f"there is no data-parallel rank {rank!r}: the ranks of this deployment are {_ranges(ranks)}",
                param=RANK_HEADER,
            )
        return self.members.of_rank(rank)

    def _best(self, hashes: list[int]) -> EngineId:
        lengths = {engine: known.blocks.match(hashes) for engine, known in self._engines.items()} if hashes else {}
        if longest := max(lengths.values(), default=0):
            least = min(known.load for known in self._engines.values())
            holders = [engine for engine, length in lengths.items() if length == longest]
            if fit := [engine for engine in holders if not _is_overloaded(self._engines[engine].load, least)]:
                return self._better_of_two(fit)
        return self._less_loaded(list(self._engines))

    def _less_loaded(self, engines: list[EngineId]) -> EngineId:
        """The one that should get the next of our requests."""
        num_ours = sum(one.num_ours for one in self._engines.values())
        num_all = sum(one.load for one in self._engines.values())
        share = max(LEAST_SHARE, num_ours / num_all) if num_all else 1.0
        known = {engine: self._engines[engine] for engine in engines}
        scores = {engine: one.num_ours + share * one.num_others for engine, one in known.items()}
        least = min(scores.values())
        return self._better_of_two([engine for engine in engines if scores[engine] < least + 1])

    def _better_of_two(self, engines: list[EngineId]) -> EngineId:
        pair = self._rng.sample(engines, min(2, len(engines)))
        return min(pair, key=lambda engine: (self._engines[engine].load, self._engines[engine].cache_use))


def rendezvous_hash(session: str, ranks: Iterable[int]) -> int:
    """The rank that a session belongs to: the same for everybody who knows these ranks, and when one is taken away only
    its sessions move (highest random weight, Thaler and Ravishankar, 1998)."""
    return max(ranks, key=lambda rank: (blake2b(f"{rank}/{session}".encode(), digest_size=8).digest(), rank))


def _is_overloaded(load: int, least: int) -> bool:
    return load > OVERLOAD_FACTOR * least and load >= least + OVERLOAD_REQUESTS


def _ranges(ranks: list[int]) -> str:
    """`0-2, 5` for 0, 1, 2 and 5."""
    starts = [rank for rank in ranks if rank - 1 not in ranks]
    ends = [rank for rank in ranks if rank + 1 not in ranks]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
