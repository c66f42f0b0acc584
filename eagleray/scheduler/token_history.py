"""The tokens in which a request looks up its last ones: its own tokens, or also the output of other requests.

Owned by the drafter. Only requests whose prompts may share blocks of the prefix cache find tokens of each other: those
with the same salt and the same adapter.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from eagleray.config.speculation import Speculation
from eagleray.scheduler.blocks import root_hash
from eagleray.scheduler.follower import Follower
from eagleray.scheduler.request import Request
from eagleray.scheduler.token_index import IndexedSequence, TokenIndex

MAX_MATCH = 64
"""Longer matches of n-grams are not told apart."""

MAX_INDEXED_AT_ONCE = 8192
"""Tokens of a request that are indexed after one step, so that a long prompt delays none."""

SHARED_LENGTHS = (2, 6)
"""Lengths of the n-grams by which tokens of other requests are found."""

NUM_SHARED_BUCKETS = 2**18
MAX_SHARED_TOKENS = 2**20
"""Most tokens of finished requests that are kept: more would not fit into the index."""


class TokenHistory(Protocol):
    """Makes the followers of requests, and keeps the index in which they look up places."""

    max_match: int

    def begin(self, request: Request) -> Follower:
        """Begin to follow other places with this request, of which nothing is indexed yet."""

    def end(self, follower: Follower) -> None:
        """Note that a request has finished."""

    def index_tokens(self, follower: Follower) -> None:
        """Index tokens of a request that are not in the index yet, up to a number."""

    def look_up(self, follower: Follower) -> None:
        """Let a request follow other places at which its last tokens occurred, if there are any with a longer match."""


class OwnTokens:
    """Every request finds its own prompt and output."""

    max_match = MAX_MATCH

    def __init__(self, options: Speculation) -> None:
        self._index = TokenIndex([options.prompt_lookup_min, options.prompt_lookup_max], max_match=MAX_MATCH)
        self._num_domains = 0

    def begin(self, request: Request) -> Follower:
        self._num_domains += 1
        return Follower(self._index.add(request.token_ids, domain=self._num_domains), request.token_ids)

    def end(self, follower: Follower) -> None:
        self._index.discard(follower.sequence)

    def index_tokens(self, follower: Follower) -> None:
        self._index.insert(follower.sequence, MAX_INDEXED_AT_ONCE)

    def look_up(self, follower: Follower) -> None:
        sequence = follower.sequence
        if sequence.num_indexed == len(sequence.token_ids):
            places, length = self._index.find(sequence, follower.token_ids, sequence.domain)
            if length > follower.match_length:
                follower.places, follower.match_length = places, length


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """A prompt of running requests."""

    sequence: IndexedSequence
    key: tuple[int, tuple[int, ...]]
    num_requests: int = 0


class SharedTokens:
    """Every request finds its prompt, and the outputs of all requests that have its salt and adapter, the last
    `suffix_decoding_max_cached_requests` finished ones among them."""

    def __init__(self, options: Speculation) -> None:
        self.max_match = options.suffix_decoding_max_tree_depth
        self._max_cached = options.suffix_decoding_max_cached_requests
        self._index = TokenIndex(SHARED_LENGTHS, max_match=self.max_match, num_buckets=NUM_SHARED_BUCKETS)
        self._prompts: dict[tuple[int, tuple[int, ...]], SharedPrompt] = {}
        self._prompt_of: dict[Follower, SharedPrompt] = {}
        self._finished: deque[IndexedSequence] = deque()
        self._num_tokens = 0
        self._num_domains = 0

    def begin(self, request: Request) -> Follower:
        count = request.num_prompt_tokens
        domain = _domain_of(request) if self._max_cached else self._new_domain()
        key = domain, tuple(request.token_ids[:count])
        if (prompt := self._prompts.get(key)) is None:
            sequence = self._index.add(key[1], domain=self._new_domain())
            prompt = self._prompts[key] = SharedPrompt(sequence, key)
        prompt.num_requests += 1
        start = max(0, count - max(self.max_match, *SHARED_LENGTHS))
        tail = request.token_ids[start:]
        sequence = self._index.add(tail, domain=domain, first_place=count - start)
        follower = Follower(sequence, request.token_ids, tail=tail, num_before_tail=start)
        self._prompt_of[follower] = prompt
        return follower

    def end(self, follower: Follower) -> None:
        prompt, sequence = self._prompt_of.pop(follower), follower.sequence
        prompt.num_requests -= 1
        if prompt.num_requests == 0:
            del self._prompts[prompt.key]
            self._index.discard(prompt.sequence)
        sequence.token_ids = array("i", sequence.token_ids)
        self._finished.append(sequence)
        self._num_tokens += len(sequence.token_ids)
        while len(self._finished) > self._max_cached or self._num_tokens > MAX_SHARED_TOKENS:
            oldest = self._finished.popleft()
            self._num_tokens -= len(oldest.token_ids)
            self._index.discard(oldest)

    def index_tokens(self, follower: Follower) -> None:
        prompt = self._prompt_of[follower].sequence
        if prompt.num_indexed < len(prompt.token_ids):
            self._index.insert(prompt, MAX_INDEXED_AT_ONCE)
        tail = follower.tail
        tail += follower.token_ids[follower.num_before_tail + len(tail) :]
        self._index.insert(follower.sequence, MAX_INDEXED_AT_ONCE)

    def look_up(self, follower: Follower) -> None:
        for domain in (self._prompt_of[follower].sequence.domain, follower.sequence.domain):
            places, length = self._index.find(follower.sequence, follower.token_ids, domain)
            if length > follower.match_length:
                follower.places, follower.match_length = places, length

    def _new_domain(self) -> int:
        self._num_domains += 1
        return self._num_domains


def _domain_of(request: Request) -> int:
    """Return the domain of the requests that find tokens of this one."""
    number = 0 if request.adapter is None else request.adapter.number
    return int.from_bytes(root_hash(request.cache_salt, adapter=number)[:8], "little")
