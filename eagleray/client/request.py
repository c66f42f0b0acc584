"""A request in the client, and the stream through which a user reads it.

`ClientRequest` is the one object that holds the state of a request: its completions, the engine that runs it, and the
exits of its engines. `InFlightRequests` owns it, sends it and delivers its chunks; a `RequestStream` only reads.

**Restarts.** A request that kills engines must fail, and alone; one whose engines are killed by others must not. The
way an engine exited does not tell the two apart: SIGKILL may come from an operator, or from a kernel that ran out of
memory because of the request. Progress does. A request that kills engines does so at the same position again and again,
so an exit is charged only to requests that the engine had started, and a token since the last exit clears the count.

The first exit is charged to all requests of the engine. From then on engines announce when they start a request that
they were sent again, and requests that were only queued there are not charged. A request with two charged exits is a
suspect: an engine runs one suspect at a time. A second, far larger count is never cleared: it ends requests that bring
a few tokens each time and still kill their engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING

from eagleray.client.completion import Completion
from eagleray.client.flat_logprobs import FlatLogprobs
from eagleray.client.logprobs import PromptPositions
from eagleray.client.outputs import CompletionDelta, RequestDelta, RequestOutput, RequestStateStats
from eagleray.client.pooling import PooledPrompt
from eagleray.client.prompt_scores import PromptScores
from eagleray.client.routing.recent_blocks import PrefixMatch
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import EagleRayError, EngineFailed, InvalidRequest, RequestFailed
from eagleray.identity import EngineId
from eagleray.messages.arrays import Array
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import SamplingParams

if TYPE_CHECKING:
    from eagleray.client.otel import RequestTrace

MAX_DELTA_ENTRIES = 1024
"""Most tokens and log-probabilities of one delta. Making and sending them takes some milliseconds. A slow reader gets
the rest in further deltas, between which the event loop serves others."""

TOKENS_AT_ONCE = 4096
"""Number of tokens that are decoded before the event loop serves others."""

SUSPECT_EXITS = 2

PROGRESS_FACTOR = 10
"""A request that brings tokens between the exits of its engines may lose `max_request_restarts` times this many."""


class ClientRequest:
    """A request of a user. `messages`: one for each completion, as the first engine gets them.

    `prompt`: its text, if known. `tokenizer` None: no text. `routing`: of engines that report routed experts.
    `max_restarts`: engines that the request may lose in a row without a token in between. `timeout`: seconds from start
    to failure. `rank`: the only engine that may run the request. `trace`: its span, if it has one.
    """

    # Slots, because every token of every request passes through here.
    __slots__ = (
        "_announces_start", "_counts_cached_tokens", "_first_index", "_is_started", "_list_type", "_max_delta_tokens",
        "_max_restarts", "_num_cached_tokens", "_num_exits", "_num_exits_without_token", "_prompt_logprobs",
        "_prompt_logprobs_were_read", "_scores", "_shows_prompt_logprobs", "arrival_time", "arrived_at", "awaits_token",
        "completions", "done", "engine", "failure", "finished_at", "first_token_at", "first_token_engine", "has_more",
        "has_output", "interrupted_at", "is_queued", "on_end", "on_output", "prefix_match", "prompt",
        "prompt_token_ids", "rank", "request_id", "session", "timeout", "timer", "trace", "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        messages: Sequence[Generate],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        scores: PromptScores | None = None,
        tokenizer: Tokenizer | None = None,
        routing: RoutingInfo | None = None,
        max_restarts: int = 0,
        timeout: float | None = None,
        session: str | None = None,
        rank: int | None = None,
        trace: RequestTrace | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = messages[0].prompt_token_ids
        self.timeout = timeout
        self.session = session
        self.rank = rank
        self.trace = trace
        routing = routing if params.return_routed_experts else None
        self.completions = [
            Completion(index, message, params, tokenizer, routing) for index, message in enumerate(messages)
        ]
        self.unfinished = dict(enumerate(self.completions))
        """The completions that an engine has yet to finish, by index."""
        self.failure: EagleRayError | None = None
        self.engine: EngineId | None = None
        """Engine that runs the request, or None while the request is queued in the client."""
        self.prefix_match: PrefixMatch | None = None
        """Blocks of the prompt that the engine should have in its cache, until it reports how many it found."""
        self._is_started = False
        """Whether the engine has announced the request or sent output of it."""
        self.awaits_token = False
        """Whether the engine has yet to send a token."""
        self.is_queued = True
        """Whether no engine has sent a token yet."""
        self.interrupted_at: float | None = None
        """Time at which an engine of the request left; None once another engine has sent a token."""
        self.timer: asyncio.TimerHandle | None = None
        self.arrival_time = 0.0
        """Time at which the request was sent, in seconds of the system's clock."""
        self.arrived_at = 0.0
        """The same time by `time.perf_counter`, as are the times below."""
        self.first_token_at: float | None = None
        self.first_token_engine: EngineId | None = None
        self.finished_at: float | None = None
        self.on_output: Callable[[], None] | None = None
        self.on_end: Callable[[ClientRequest], None] | None = None
        """Called when the request is no longer in flight."""
        self.has_output = asyncio.Event()
        """Set when there is something to read."""
        self.done = asyncio.Event()
        """Set when the request is no longer in flight."""
        self.has_more = False
        """Whether the last delta left something to read, because of its bounded size."""
        self.prompt = prompt
        self._max_restarts = max_restarts
        self._num_exits = 0
        """Engines that exited and were charged to the request."""
        self._num_exits_without_token = 0
        """Charged exits since the last token."""
        self._announces_start = False
        num_logprobs = (params.logprobs or 0) + len(params.logprob_token_ids or ())
        self._max_delta_tokens = max(1, MAX_DELTA_ENTRIES // (1 + num_logprobs))
        self._first_index = 0
        """Index of the completion that comes first in the next delta."""
        self._prompt_logprobs: PromptPositions | None = None
        if params.prompt_logprobs is not None or scores is not None:
            self._prompt_logprobs = PromptPositions(
                len(self.prompt_token_ids),
                tokenizer if params.detokenize else None,
                num_requested=0 if scores is None else scores.num_ids,
            )
        self._shows_prompt_logprobs = params.prompt_logprobs is not None
        self._scores = scores
        self._list_type = FlatLogprobs.of if params.flat_logprobs else list
        self._prompt_logprobs_were_read = False
        self._num_cached_tokens = 0
        self._counts_cached_tokens = True

    # Engines.

    @property
    def message(self) -> Generate:
        """The first message of the first unfinished completion."""
        return next(iter(self.unfinished.values())).message

    @property
    def engine_request_ids(self) -> list[str]:
        """Ids under which the engine knows the unfinished completions."""
        return [completion.engine_request_id for completion in self.unfinished.values()]

    @property
    def num_known_tokens(self) -> int:
        """Number of tokens that a new engine computes before it continues: prompts and outputs so far."""
        num_output_tokens = sum(len(completion.token_ids) for completion in self.unfinished.values())
        return len(self.prompt_token_ids) * len(self.unfinished) + num_output_tokens

    @property
    def progress(self) -> str:
        """Progress of the request, for an error message."""
        waits = "" if self.engine else ", and it was waiting for an engine to come back"
        if self.message.pools:
            return f"the vector of its prompt had not come{waits}"
        num_tokens = sum(len(completion.token_ids) for completion in self.completions)
        limit = self.message.stopping.max_tokens * len(self.completions)
        return f"it had {num_tokens} of at most {limit} tokens{waits}"

    @property
    def is_suspect(self) -> bool:
        """Whether the request may have made engines exit."""
        least = min(SUSPECT_EXITS, self._max_restarts)
        return self._num_exits > 0 and (
            self._num_exits_without_token >= least or self._num_exits >= least * PROGRESS_FACTOR
        )

    def next_messages(self) -> list[Generate]:
        """Return the messages that make the next engine run the request, or continue it."""
        self._announces_start = self._num_exits > 0
        self._is_started, self.awaits_token = False, True
        return [
            completion.next_message(
                prompt_logprobs_from=self.prompt_logprobs_from if index == 0 else 1,
                is_suspect=self.is_suspect,
                announce_start=self._announces_start,
            )
            for index, completion in self.unfinished.items()
        ]

    def record_started(self, *, has_token: bool) -> None:
        """Record that the engine has started the request, and whether it has sent a token."""
        self._is_started = True
        self.awaits_token = not has_token

    def leave_engine(self) -> None:
        """Unassign the request from an engine that left on purpose, which is not charged to the request."""
        self.engine = self.prefix_match = None
        # The count of cached tokens may have been delivered already, so that of the next engine is ignored.
        if self.completions[0].has_output or self.prompt_logprobs_from > 1 or self._num_cached_tokens:
            self._counts_cached_tokens = False

    def on_engine_exit(self, cause: str) -> EngineFailed | None:
        """Unassign the request from an engine that exited. Return an error if the request may not continue."""
        self.leave_engine()
        if self._announces_start and not self._is_started:
            return None
        self._num_exits += 1
        self._num_exits_without_token = self._num_exits_without_token + 1 if self.awaits_token else 1
        if self._num_exits_without_token > self._max_restarts:
            engines = "1 engine has" if self._num_exits == 1 else f"{self._num_exits_without_token} engines have"
            return EngineFailed(
                f"{cause}; {engines} ended with this request in flight, and `max_request_restarts` is "
                f"{self._max_restarts}"
            )
        if self._num_exits > self._max_restarts * PROGRESS_FACTOR:
            return EngineFailed(
                f"{cause}; {self._num_exits} engines have ended with this request in flight, more than "
                f"{PROGRESS_FACTOR} times `max_request_restarts` ({self._max_restarts})"
            )
        return None

    # Output.

    @property
    def prompt_logprobs_from(self) -> int:
        """First position of the prompt whose log-probabilities are missing; 1 if they were not requested."""
        return 1 if self._prompt_logprobs is None else len(self._prompt_logprobs)

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that the prefix cache had."""
        return self._num_cached_tokens

    @property
    def is_finished(self) -> bool:
        """Whether every completion has finished, or the request has failed."""
        return self.failure is not None or self._has_all

    def deliver(self, completion: Completion, chunk: Chunk) -> None:
        """Add the output of a step to an unfinished completion."""
        if chunk.finish_reason is FinishReason.ERROR:
            message = chunk.error or "the engine does not say why the request failed"
            self.failure = InvalidRequest(message, param=chunk.param) if chunk.is_user_error else RequestFailed(message)
            return
        if chunk.prompt_logprobs is not None and self._prompt_logprobs is not None:
            self._prompt_logprobs.append(chunk.prompt_logprobs)
        # The first completion has just put the prompt in the cache, so the hits of the others say nothing.
        if completion.index == 0 and self._counts_cached_tokens:
            self._num_cached_tokens += chunk.num_cached_tokens
        completion.deliver(chunk)

    def abort(self) -> None:
        """End every unfinished completion with the output that it has."""
        for completion in self.completions:
            if completion.finish_reason is None:
                completion.abort()

    def notify_reader(self, *, done: bool) -> None:
        """Wake the reader because there is new output, or because the request is `done`."""
        self.has_output.set()
        if self.on_output is not None:
            self.on_output()
        if done:
            self.done.set()

    def pop_delta(self) -> RequestDelta | None:
        """Return the output since the last call, as much as one delta may hold; None if there is nothing new."""
        outputs = self._pop_outputs()
        prompt_logprobs = None if self._prompt_logprobs_were_read else self._complete_prompt_logprobs
        if not outputs and prompt_logprobs is None:
            return None
        self._prompt_logprobs_were_read = prompt_logprobs is not None or self._prompt_logprobs_were_read
        return RequestDelta(
            request_id=self.request_id,
            outputs=outputs,
            finished=all(completion.is_read for completion in self.completions),
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _pop_outputs(self) -> list[CompletionDelta]:
        """Return the deltas of the completions, by index. Completions that do not fit come first in the next delta."""
        count, room = len(self.completions), self._max_delta_tokens
        first = self._first_index if self._first_index < count else 0
        outputs = []
        for offset in range(first, first + count):
            if room == 0:
                self._first_index = offset % count
                break
            if delta := self.completions[offset % count].pop_delta(room):
                room -= len(delta.token_ids)
                outputs.append(delta)
        self.has_more = room == 0 and any(completion.has_unread_tokens for completion in self.completions)
        return sorted(outputs, key=lambda delta: delta.index) if first else outputs

    def output(self, *, with_logprobs: bool = True) -> RequestOutput:
        """Return the whole output so far, read or not. `with_logprobs` False: they were read as deltas."""
        prompt_logprobs = self._complete_prompt_logprobs if with_logprobs else None
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if prompt_logprobs is None else self._list_type(prompt_logprobs),
            outputs=[completion.output(with_logprobs=with_logprobs) for completion in self.completions],
            finished=self._has_all,
            num_cached_tokens=self._num_cached_tokens,
            metrics=self._metrics(),
            prompt_token_id_logprobs=self._prompt_scores,
        )

    def _metrics(self) -> RequestStateStats | None:
        if self.finished_at is None:
            return None
        first = self.first_token_at
        return RequestStateStats(
            num_generation_tokens=sum(len(completion.token_ids) for completion in self.completions),
            arrival_time=self.arrival_time,
            first_token_ts=first or 0.0,
            last_token_ts=self.finished_at,
            first_token_latency=0.0 if first is None else first - self.arrived_at,
        )

    @property
    def _has_all(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    @property
    def _complete_prompt_logprobs(self) -> PromptPositions | None:
        positions = self._prompt_logprobs if self._shows_prompt_logprobs else None
        return positions if positions is not None and positions.is_complete else None

    @property
    def _prompt_scores(self) -> Array | None:
        positions = self._prompt_logprobs
        if self._scores is None or positions is None or not positions.is_complete:
            return None
        return self._scores.select(positions.requested())


class RequestStream:
    """The output of a request, for its user. Exits of engines do not show here, apart from the time that they cost.

    Either `async for delta in stream`, or `await stream.result()`. When the iteration is left early or the waiting task
    is cancelled, the request is aborted; `async with stream` makes sure of it whatever happens in the block.

    Both raise `RequestFailed` if this request failed, `DeadlineExceeded` if it timed out, and `EngineFailed` if it lost
    more engines than it may, or the last engine of the instance.
    """

    def __init__(self, request: ClientRequest, abort: Callable[[], None]) -> None:
        self._request = request
        self._abort = abort

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        return self._request.prompt_token_ids

    @property
    def prompt(self) -> str | None:
        """Text of the prompt; None if it was given as token ids."""
        return self._request.prompt

    @property
    def first_token_at(self) -> float | None:
        """Time at which the first token of any completion arrived, by `time.perf_counter`."""
        return self._request.first_token_at

    @property
    def first_token_engine(self) -> EngineId | None:
        """Engine that sent the first token."""
        return self._request.first_token_engine

    @property
    def num_tokens(self) -> int:
        """Number of tokens that have arrived, of all completions together."""
        return sum(len(completion.token_ids) for completion in self._request.completions)

    @property
    def has_more(self) -> bool:
        """Whether the last delta left something to read: yield to the event loop before the next `pop_delta`."""
        return self._request.has_more

    def set_on_output(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever `pop_delta` may return something."""
        self._request.on_output = callback

    async def __aiter__(self) -> AsyncGenerator[RequestDelta, None]:
        """Yield output as soon as it arrives. The last delta is `finished`."""
        try:
            while True:
                self._request.has_output.clear()
                if delta := self.pop_delta():
                    yield delta
                    if delta.finished:
                        return
                elif self._request.is_finished:  # the end was read before
                    return
                if self.has_more:
                    await asyncio.sleep(0)
                elif not self._request.done.is_set():
                    await self._request.has_output.wait()
        finally:
            self.abort()

    def pop_delta(self) -> RequestDelta | None:
        """Return the output since the last call, as much as one delta may hold, or None. Raises as the iteration."""
        delta = self._request.pop_delta()
        if delta is None and self._request.failure is not None:
            raise self._request.failure
        return delta

    def check_finished(self) -> bool:
        """Return whether the request has finished. Raises as the iteration."""
        if self._request.failure is not None:
            raise self._request.failure
        return self._request.is_finished

    def output(self) -> RequestOutput:
        """Return the whole output so far, read or not."""
        return self._request.output()

    async def wait_until_finished(self) -> None:
        """Wait for the end of the request. Raises as the iteration."""
        try:
            await self._request.done.wait()
        finally:
            self.abort()
        if self._request.failure is not None:
            raise self._request.failure

    async def result(self, *, with_logprobs: bool = True) -> RequestOutput:
        """Return the whole output when the request has finished. Cheaper than deltas: text is decoded at the end, once.

        `with_logprobs` False leaves log-probabilities out, because they were read as deltas.
        """
        await self.wait_until_finished()
        num_tokens = 0
        for completion in self._request.completions:
            completion.decode(len(completion.token_ids))
            num_tokens += len(completion.token_ids)
            if num_tokens > TOKENS_AT_ONCE:
                num_tokens = 0
                await asyncio.sleep(0)
        return self._request.output(with_logprobs=with_logprobs)

    async def pooled(self) -> PooledPrompt:
        """Return the vector of a request to a pooling model when it has finished. Raises as the iteration, and
        `RequestFailed` if the request was aborted."""
        await self.wait_until_finished()
        vector = self._request.completions[0].pooled
        if vector is None:
            raise RequestFailed("the request was aborted before its vector was computed")
        return PooledPrompt(vector, self.prompt_token_ids, self._request.num_cached_tokens)

    def abort(self) -> None:
        """End the request now, with finish reason `abort`; its output stays readable. Harmless after the end."""
        if not self._request.done.is_set():
            self._abort()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.abort()
