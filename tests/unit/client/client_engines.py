"""An engine in memory that computes its output from the request alone, as a real engine does.

The token at an index of the output follows from the seed and the index. The output tokens in the message of a resumed
request must be correct, or the test that sent it has found a bug.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from client_fakes import INFO, FakeEngine
from client_tokenizers import load

from eagleray.messages.outputs import Chunk, Chunks, FinishReason, PromptLogprobs, TokenColumns, TokenLogprobs
from eagleray.messages.requests import Generate

TEXT = "Größe 😀 and 👍🏽 hello 東京 again, café мир over the lazy dog. "
OUTPUT_TOKENS = load("byte_level").encode(TEXT, add_special_tokens=False)
"""Most characters of the text take several tokens."""
POISON = 99
"""Token that kills an engine when it computes a prompt with it."""
CHUNK = 2
"""Tokens that a step computes of one request."""


def token_at(seed, place):
    """Return the token at this index of the output."""
    return OUTPUT_TOKENS[(seed + place) % len(OUTPUT_TOKENS)]


def routed_rows(token_ids, start, end):
    """Return the experts that compute the tokens at these positions, which depend on the tokens before: [n, 2, 2]"""
    sums = np.cumsum(np.array(token_ids[:end]) * (1 + np.arange(end)))[start:, None]
    return ((sums * [1, 3, 5, 7] + [0, 1, 2, 3]) % INFO.routing.num_experts).astype(np.uint16).reshape(-1, 2, 2)


def columns_of(chunks):
    """Return columns of the token of each chunk."""
    logprobs = [next(iter(chunk.logprobs), None) for chunk in chunks]
    experts = [chunk.routed_experts for chunk in chunks]
    return TokenColumns(
        [chunk.request_id for chunk in chunks],
        [token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs if any(logprobs) else [],
        experts if any(experts) else [],
    )


@dataclass
class Run:
    """A request of the engine."""

    message: Generate
    token_ids: list[int]
    """Tokens of the output."""
    num_computed: int = 0
    prompt_logprobs_from: int = 1
    routed_experts_from: int | None = None
    is_new: bool = True
    finish_reason: FinishReason | None = field(default=None)

    def step(self, num_cached_tokens):
        """Compute a step, and return its chunk."""
        sampling, stopping = self.message.sampling, self.message.stopping
        num_known = len(self.message.prompt_token_ids) + len(self.token_ids)
        end = min(self.num_computed + CHUNK, num_known)
        fields = {"prompt_logprobs": self._prompt_logprobs(end), "routed_experts": self._routed_experts(end)}
        self.num_computed = end
        if end == num_known:
            token_id = token_at(sampling.seed, len(self.token_ids))
            self.token_ids.append(token_id)
            fields["token_ids"] = [token_id]
            if sampling.logprobs is not None:
                fields["logprobs"] = [TokenLogprobs([token_id], [-len(self.token_ids) / 4], 1)]
            if token_id in stopping.stop_token_ids and len(self.token_ids) >= stopping.min_tokens:
                self.finish_reason, fields["stop_token_id"] = FinishReason.STOP, token_id
            elif len(self.token_ids) >= stopping.max_tokens:
                self.finish_reason = FinishReason.LENGTH
        if all(value is None for value in fields.values()):
            return None
        num_cached, self.is_new = num_cached_tokens if self.is_new else 0, False
        return Chunk(
            request_id=self.message.request_id,
            finish_reason=self.finish_reason,
            num_cached_tokens=num_cached,
            **fields,
        )

    def _routed_experts(self, end):
        start = self.routed_experts_from
        if start is None or start >= end:
            return b""
        self.routed_experts_from = end
        return routed_rows([*self.message.prompt_token_ids, *self.token_ids], start, end).tobytes()

    def _prompt_logprobs(self, end):
        prompt = self.message.prompt_token_ids
        last = min(end, len(prompt) - 1)
        positions = range(max(self.prompt_logprobs_from, self.num_computed + 1), last + 1)
        if self.message.sampling.prompt_logprobs is None or not positions:
            return None
        self.prompt_logprobs_from = last + 1
        return PromptLogprobs(
            start=positions[0],
            token_ids=np.array([[prompt[position]] for position in positions], np.int32),
            logprobs=np.array([[-position / 4] for position in positions], np.float32),
            ranks=np.array(list(positions), np.int32),
        )


class ComputingEngine(FakeEngine):
    """Engine that runs all its requests at once, but only one suspect at a time."""

    def __init__(self, setup, rank=0, incarnation=0, info=INFO):
        super().__init__(setup, rank, info, incarnation)
        self.num_cached_tokens = 4 * (1 + rank + incarnation)
        """Number of tokens that it finds in its cache for every prompt; different from other engines."""
        self.has_exited = False
        self._runs = {}
        self._announced = set()
        self._begun = set()
        """Ids of the requests that have a token."""
        self._num_taken = 0

    @property
    def has_work(self):
        self._take()
        return bool(self._runs)

    async def step(self, count=1):
        """Compute `count` steps, or fewer if a prompt kills it."""
        for _ in range(count):
            self._take()
            runs = await self._schedule()
            if self.has_exited or any(POISON in run.message.prompt_token_ids for run in runs):
                self.has_exited = True
                return
            chunks = [chunk for run in runs if (chunk := run.step(self.num_cached_tokens))]
            self._runs = {name: run for name, run in self._runs.items() if run.finish_reason is None}
            if chunks:
                await self._setup.deliver(self._message(chunks))

    def _message(self, chunks):
        """Return the message with these chunks, of which those of a further token are replaced as an engine does."""
        tokens, detailed, others = {}, [], []
        for chunk in chunks:
            name, details = chunk.request_id, {"logprobs": chunk.logprobs, "routed_experts": chunk.routed_experts}
            if name not in self._begun or chunk != Chunk(request_id=name, token_ids=chunk.token_ids, **details):
                others.append(chunk)
            elif any(details.values()):
                detailed.append(chunk)
            else:
                (tokens[name],) = chunk.token_ids
            if chunk.token_ids:
                self._begun.add(name)
        return Chunks(self.id, others, tokens, columns_of(detailed) if detailed else None)

    def _take(self):
        self.receive()
        for name in self.request_ids[self._num_taken :]:
            message = self.requests[name]
            token_ids = list(message.output_token_ids)
            assert token_ids == [token_at(message.sampling.seed, place) for place in range(len(token_ids))]
            assert len(token_ids) < message.stopping.max_tokens
            self._runs[name] = Run(
                message,
                token_ids,
                prompt_logprobs_from=message.prompt_logprobs_from,
                routed_experts_from=message.routed_experts_from,
            )
        self._num_taken = len(self.request_ids)
        for name in self.aborted:
            self._runs.pop(name, None)

    async def _schedule(self):
        suspects = [run for run in self._runs.values() if run.message.is_suspect][:1]
        others = [run for run in self._runs.values() if not run.message.is_suspect]
        for run in suspects + [run for run in others if run.message.announce_start]:
            name = run.message.request_id
            if name not in self._announced:
                self._announced.add(name)
                await self._setup.deliver(Chunks(self.id, [Chunk(request_id=name, is_started=True)]))
        return others + suspects
