"""The state of a request: what lasts until it ends, and what it has only while it runs.

Owned by the scheduler; nobody else writes to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from eagleray.identity import ClientId
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import NewRow
from eagleray.scheduler.admission import check_admission
from eagleray.scheduler.prefix import root_hash


class AddressedChunk(NamedTuple):
    """A chunk and whom it is for."""

    client: ClientId
    chunk: Chunk


class Finish(NamedTuple):
    """Why a request has ended."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What lasts until the request ends. It waits while `run` is None."""

    client: ClientId
    request_id: str
    sampling: Sampling
    stopping: Stopping
    priority: int
    arrival: int
    """Number of the request in the order of arrival."""
    token_ids: list[int]
    """The prompt, then what was generated."""
    num_prompt_tokens: int
    max_num_tokens: int
    """It ends when it has this many tokens, prompt included."""
    root_hash: bytes
    block_hashes: list[bytes] = field(default_factory=list)
    """Of the first full blocks of `token_ids`; extended when needed."""
    prompt_logprobs_from: int = 1
    """First position whose prompt log-probabilities were not delivered yet, if the request wants them."""
    routed_experts_from: int | None = None
    """First position whose routed experts were not delivered yet; None if the request does not want them."""
    is_suspect: bool = False
    """Engines have died with it: see `suspects`."""
    announce_start: bool = False
    """Whether the engine sends a notice to the client before it computes the request."""
    was_started: bool = False
    num_cached_tokens: int = 0
    """Prompt tokens found in the cache at the first start; 0 again once the client was told."""
    run: Run | None = None

    @property
    def num_readable_tokens(self) -> int:
        """How many of the first tokens may be read from the cache instead of computed.

        The last one gives the next token, and the one before a position gives that position's log-probability.
        """
        num_tokens = len(self.token_ids) - 1
        if self.sampling.prompt_logprobs is not None and self.prompt_logprobs_from < self.num_prompt_tokens:
            num_tokens = min(num_tokens, self.prompt_logprobs_from - 1)
        return num_tokens

    def append(self, token_id: int) -> Finish | None:
        """The next token is known. Says so if it was the last one."""
        self.token_ids.append(token_id)
        if len(self.token_ids) - self.num_prompt_tokens >= self.stopping.min_tokens:
            if token_id in self.stopping.eos_token_ids:
                return Finish(FinishReason.STOP)
            if token_id in self.stopping.stop_token_ids:
                return Finish(FinishReason.STOP, token_id)
        return Finish(FinishReason.LENGTH) if len(self.token_ids) >= self.max_num_tokens else None

    def answer(self, **fields: Any) -> AddressedChunk:
        """The next chunk, with these fields of `Chunk`; the first one tells how much of the prompt was cached."""
        num_cached, self.num_cached_tokens = self.num_cached_tokens, 0
        return AddressedChunk(self.client, Chunk(request_id=self.request_id, num_cached_tokens=num_cached, **fields))


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """A request while it has a row.

    After a preemption the request gets another `Run`, so this object tells its epochs apart: a result for a `Run` that
    is over is nobody's.
    """

    request: Request
    row: int
    block_ids: list[int]
    num_computed_tokens: int
    """In the cache, or written there by a step that was planned."""
    num_reported_tokens: int
    """Found in the cache, or written there by a step that was applied, if the request wants routed experts."""
    num_committed_blocks: int
    """The first this many blocks were made known to the prefix cache."""
    first_step: int
    """The first step that computes something of it."""
    num_placeholders: int = 0
    """Tokens that planned steps sample and whose ids are not known here yet; the worker has them in the row."""
    last_step: int = -1
    """The last step that computes something of it."""

    @property
    def is_current(self) -> bool:
        """It is not over."""
        return self.request.run is self

    @property
    def num_known_tokens(self) -> int:
        """As the worker will see it when the planned steps are done."""
        return len(self.request.token_ids) + self.num_placeholders

    @property
    def num_uncomputed_tokens(self) -> int:
        """What is left to compute; the token at the limit needs no computing."""
        num_known = self.num_known_tokens
        return num_known - self.num_computed_tokens if num_known < self.request.max_num_tokens else 0

    def advance(self, num_tokens: int, *, step: int) -> None:
        """`step` computes the next `num_tokens` tokens and, if they are the last known ones, samples another."""
        self.num_computed_tokens += num_tokens
        self.num_placeholders += self.num_computed_tokens == self.num_known_tokens
        self.last_step = step

    def retreat(self, num_tokens: int) -> None:
        """All steps in flight are dropped, and with them the last `num_tokens` computed tokens."""
        self.num_computed_tokens -= num_tokens
        self.num_placeholders = 0
        self.last_step = -1

    def row_start(self) -> NewRow:
        """What a worker must know. The lists are copies: it may live in this process, and ours go on changing."""
        return NewRow(
            row=self.row,
            request_id=self.request.request_id,
            token_ids=list(self.request.token_ids),
            num_prompt_tokens=self.request.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            block_ids=list(self.block_ids),
            sampling=self.request.sampling,
            prompt_logprobs_from=self.request.prompt_logprobs_from,
        )


def new_request(
    message: Generate, *, priority: int, arrival: int, max_model_len: int, vocab_size: int, has_routing: bool = False
) -> Request:
    """The request as if it had been preempted after what it has generated elsewhere, if it has.

    Raises `InvalidRequest` for what can never run.
    """
    check_admission(message, max_model_len=max_model_len, vocab_size=vocab_size, has_routing=has_routing)
    num_prompt_tokens = len(message.prompt_token_ids)
    return Request(
        client=message.client,
        request_id=message.request_id,
        sampling=message.sampling,
        stopping=message.stopping,
        priority=priority,
        arrival=arrival,
        token_ids=[*message.prompt_token_ids, *message.output_token_ids],
        num_prompt_tokens=num_prompt_tokens,
        max_num_tokens=min(num_prompt_tokens + message.stopping.max_tokens, max_model_len),
        root_hash=root_hash(message.cache_salt),
        prompt_logprobs_from=message.prompt_logprobs_from,
        routed_experts_from=message.routed_experts_from,
        is_suspect=message.is_suspect,
        announce_start=message.announce_start or message.is_suspect,
    )
