"""State of a request: `Request` lasts until it finishes, `Run` only while it has a row.

Owned by the scheduler, the only one that writes to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagleray.identity import FIRST_WEIGHT_VERSION, ClientId
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import NewRow
from eagleray.scheduler.adapters import AdapterInSlot
from eagleray.scheduler.admission import check_admission
from eagleray.scheduler.blocks import root_hash
from eagleray.scheduler.step_outputs import AddressedChunk
from eagleray.scheduler.timings import RequestTimes


class Finish(NamedTuple):
    """Reason for which a request finished."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """State that lasts until the request finishes. The request is queued while `run` is None."""

    client: ClientId
    request_id: str
    sampling: Sampling
    stopping: Stopping
    priority: int
    arrival: int
    """Number of the request in the order of arrival."""
    token_ids: list[int]
    """Tokens of the prompt, then the generated ones."""
    num_prompt_tokens: int
    max_num_tokens: int
    """Number of tokens, prompt included, at which the request finishes."""
    end_token_ids: frozenset[int]
    """Tokens of which each finishes the request, unless it has too few tokens."""
    cache_salt: str
    root_hash: bytes
    adapter: AdapterInSlot | None = None
    """Low-rank adapter that computes the request, from its first token to its last."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the first full blocks of `token_ids`; extended when needed."""
    prompt_logprobs_from: int = 1
    """First position whose prompt log-probabilities have not been delivered yet, if the request wants them."""
    is_detailed: bool = False
    """Whether the request wants log-probabilities or routed experts of its tokens."""
    routed_experts_from: int | None = None
    """First position whose routed experts have not been delivered yet; None if the request does not want them."""
    skip_reading_prefix_cache: bool = False
    """Whether every token is computed, even if the prefix cache has some."""
    pools: bool = False
    """Whether the request finishes with the vector of its prompt, without any token."""
    is_suspect: bool = False
    """Whether several engines exited while the request ran on them: see `waiting.Quarantine`."""
    announce_start: bool = False
    """Whether the client receives a chunk before the first step that computes the request, and maybe one before its
    grammar is compiled."""
    was_started: bool = False
    weight_version: str = FIRST_WEIGHT_VERSION
    """Version of the weights that made the last delivered token, as the client knows it."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache at the first admission; 0 again once reported to the client."""
    times: RequestTimes = field(default_factory=RequestTimes)
    follower: Any = None
    """The drafter's state of the request, made by `Drafter.begin`; None without speculation, and before the first
    step."""
    run: Run | None = None

    @property
    def is_underway(self) -> bool:
        """Whether the request has had a row, here or in another engine."""
        return self.was_started or self.is_suspect or len(self.token_ids) > self.num_prompt_tokens

    @property
    def num_readable_tokens(self) -> int:
        """Number of first tokens that may be read from the cache instead of computed.

        The last token is computed because it yields the next one, and the token before a position because it yields
        that position's log-probability.
        """
        if self.skip_reading_prefix_cache:
            return 0
        num_tokens = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is not None and self.prompt_logprobs_from < self.num_prompt_tokens:
            num_tokens = min(num_tokens, self.prompt_logprobs_from - 1)
        return num_tokens

    def find_finish(self, token_ids: Sequence[int]) -> tuple[int, Finish | None]:
        """Return how many of the next generated tokens belong to the request, and a `Finish` if it ends with them."""
        known, stopping = len(self.token_ids), self.stopping
        for count, token_id in enumerate(token_ids, 1):
            if known + count - self.num_prompt_tokens >= stopping.min_tokens:
                if token_id in stopping.eos_token_ids:
                    return count, Finish(FinishReason.STOP)
                if token_id in stopping.stop_token_ids:
                    return count, Finish(FinishReason.STOP, token_id)
            if known + count >= self.max_num_tokens:
                return count, Finish(FinishReason.LENGTH)
        return len(token_ids), None

    def set_update(self, update: int, num_loads: int) -> None:
        """Look up and register only blocks that were computed with the weights of this update and load."""
        self.root_hash = root_hash(self.cache_salt, update, num_loads, adapter=_number_of(self.adapter))
        self.block_hashes.clear()

    def make_chunk(self, **fields: Any) -> AddressedChunk:
        """Make the next chunk with these fields of `Chunk`; the first one reports the cached prompt tokens."""
        num_cached, self.num_cached_tokens = self.num_cached_tokens, 0
        return AddressedChunk(self.client, Chunk(request_id=self.request_id, num_cached_tokens=num_cached, **fields))

    def make_start_chunk(self) -> AddressedChunk:
        """Make the chunk that announces the start."""
        return AddressedChunk(self.client, Chunk(request_id=self.request_id, is_started=True))


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """A stay of a request in a row, from admission to preemption or finish.

    After a preemption the request gets another `Run`, so a result that belongs to an ended run is recognized and
    dropped.
    """

    request: Request
    row: int
    block_ids: list[int]
    num_computed_tokens: int
    """Number of tokens in the cache, or written there by a planned step."""
    num_reported_tokens: int
    """Number of tokens found in the cache, or written there by an applied step, if the request wants routed experts."""
    num_committed_blocks: int
    """Number of first blocks that are registered in the prefix cache."""
    first_step: int
    """First step that computes tokens of this run."""
    num_initial_tokens: int
    """Number of tokens that the request had at its admission."""
    wants_routed_experts: bool = False
    is_cacheable: bool = True
    """Whether other requests may find its blocks; False once the weights changed during the run."""
    steady_until: int = 0
    """Number of computed tokens up to which the run is steady: each step computes its last token and samples the next,
    and nothing else happens to it unless that one ends the request. A run that has reached it because its blocks are
    full remains steady if there is another block. 0 while that is not known."""
    num_drafts: int = 0
    """Number of drafted tokens in the step in flight that computes this run. No other step may compute it meanwhile."""
    is_proposing: bool = False
    """Whether the draft model proposes tokens at the end of the step in flight that computes this run. No other step
    may compute it meanwhile."""
    num_draft_cached: int = 0
    """Number of first tokens that the draft model need not compute any longer."""
    is_catching_up: bool = False
    """Whether the draft model has computed some of the run's tokens, but not all."""
    settled_token_ids: list[int] = field(default_factory=list)
    """Tokens by a step with drafts that the workers do not know yet to be those of the row."""

    @property
    def is_current(self) -> bool:
        """Whether the run has not ended."""
        return self.request.run is self

    @property
    def is_drafting(self) -> bool:
        """Whether the step in flight that computes this run has drafts, or makes some."""
        return self.num_drafts > 0 or self.is_proposing

    @property
    def has_sampled(self) -> bool:
        """Whether a token that this run made has been applied."""
        return len(self.request.token_ids) > self.num_initial_tokens

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens that the worker will know when the planned steps are done: a step that computes the last
        known token samples the next one."""
        return max(len(self.request.token_ids), self.num_computed_tokens + 1)

    @property
    def num_placeholders(self) -> int:
        """Number of tokens that planned steps sample and whose ids only the worker knows so far."""
        return max(0, self.num_computed_tokens + 1 - len(self.request.token_ids))

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens left to compute; the token at the limit needs no computing."""
        if self.num_known_tokens >= self.request.max_num_tokens:
            return 0
        return self.num_known_tokens - self.num_computed_tokens

    def settle(self, token_ids: list[int]) -> None:
        """Note the tokens that the step in flight sampled, one for its placeholder and one for each accepted draft,
        before they are appended to the request."""
        self.num_computed_tokens += len(token_ids) - 1
        if self.num_drafts:
            self.num_drafts = 0
            self.settled_token_ids = token_ids

    def retreat(self, num_tokens: int) -> None:
        """Take back the last `num_tokens` computed tokens, because all steps in flight are dropped."""
        self.num_computed_tokens -= num_tokens
        self.num_drafts = 0
        self.is_proposing = False
        self.steady_until = 0

    def new_row(self) -> NewRow:
        """Return the state that a worker needs to run this request in a row."""
        self.settled_token_ids = []
        return NewRow(  # lists are copied: a worker in this process must not see ours change
            row=self.row,
            request_id=self.request.request_id,
            token_ids=list(self.request.token_ids),
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=list(self.block_ids),
            sampling=self.request.sampling,
            prompt_logprobs_from=self.request.prompt_logprobs_from,
            adapter_slot=-1 if self.request.adapter is None else self.request.adapter.slot,
        )


def new_request(
    message: Generate,
    *,
    priority: int,
    arrival: int,
    max_model_len: int,
    vocab_size: int,
    has_routing: bool = False,
    pools: bool = False,
    update: int = 0,
    num_loads: int = 0,
    adapter: AdapterInSlot | None = None,
) -> Request:
    """Make the state of a request; one that resumes looks as if it had been preempted after its last token.

    `update`: number of the last weight update. `num_loads`: number of calls of `Scheduler.on_weights_loaded`.
    `adapter`: the adapter that the request names. Raises `InvalidRequest` if the request can never run.
    """
    check_admission(message, max_model_len=max_model_len, vocab_size=vocab_size, has_routing=has_routing, pools=pools)
    num_prompt_tokens = len(message.prompt_token_ids)
    # The place of a token that never comes keeps a pooled prompt of full length from looking finished.
    limit = max_model_len + pools
    return Request(
        client=message.client,
        request_id=message.request_id,
        sampling=message.sampling,
        stopping=message.stopping,
        priority=priority,
        arrival=arrival,
        token_ids=[*message.prompt_token_ids, *message.output_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=min(num_prompt_tokens + message.stopping.max_tokens, limit),
        end_token_ids=frozenset((*message.stopping.eos_token_ids, *message.stopping.stop_token_ids)),
        cache_salt=message.cache_salt,
        root_hash=root_hash(message.cache_salt, update, num_loads, adapter=_number_of(adapter)),
        adapter=adapter,
        prompt_logprobs_from=message.prompt_logprobs_from,
        skip_reading_prefix_cache=message.skip_reading_prefix_cache,
        pools=message.pools,
        is_detailed=message.sampling.wants_logprobs or message.routed_experts_from is not None,
        routed_experts_from=message.routed_experts_from,
        is_suspect=message.is_suspect,
        announce_start=message.announce_start or message.is_suspect,
    )


def _number_of(adapter: AdapterInSlot | None) -> int:
    return 0 if adapter is None else adapter.number
