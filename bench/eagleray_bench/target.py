"""A server with OpenAI's API, as a benchmark sees it: what it serves, and how to ask it.

Only fields of OpenAI's API are used, and `ignore_eos`, which vLLM and eagleray have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from eagleray.errors import EagleRayError, UserError
from eagleray_bench.http import HttpClient
from eagleray_bench.lengths import Shape
from eagleray_bench.load import Answered, Failed, ask
from eagleray_bench.workload import Job, as_text, vocab_size_of

__all__ = ["ServedModel", "Target", "WordLengths", "open_target"]

COMPLETIONS, CHAT = "/completions", "/chat/completions"
LOOK_UP_SECONDS = 30.0
PROBES = (8, 40)
"""Words of the two prompts that tell how many tokens a word is."""
PROBE_STRIDE = 7
"""Neighbouring words have a letter in common."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that a server has."""

    name: str
    max_model_len: int | None
    """None: the server does not say."""
    vocab_size: int | None
    """None unless the server's checkpoint is on this machine."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model behind a URL."""

    client: HttpClient
    endpoint: str
    model: ServedModel
    temperature: float
    ignore_eos: bool
    timeout: float
    """Seconds that an answer may take."""

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith(CHAT)

    def body(self, job: Job) -> bytes:
        """The request for `job`: to complete its token ids, or to answer a word for each of them."""
        asked: dict[str, Any] = {"model": self.model.name}
        if self.is_chat:
            asked["messages"] = [{"role": "user", "content": as_text(job.prompt)}]
        else:
            asked["prompt"] = job.prompt
        asked |= {
            "max_tokens": job.num_output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            asked["ignore_eos"] = True
        return msgspec.json.encode(asked)

    async def try_out(self, job: Job) -> Answered:
        """Ask, and insist on an answer. Raises `EagleRayError` with the cause if there is none."""
        outcome = await ask(self.client, self.endpoint, self.body(job), timeout=self.timeout)
        if isinstance(outcome, Failed):
            raise EagleRayError(f"the first request to {self.client.url}{self.endpoint} failed: {outcome.cause}")
        return outcome

    async def word_lengths(self) -> WordLengths:
        """How words become tokens here: asked of the server, which has the tokenizer and the chat template."""
        counts = []
        for num_words in PROBES:
            words = [PROBE_STRIDE * word for word in range(num_words)]
            counts.append((await self.try_out(Job(words, num_output=1))).num_prompt_tokens)
        few, many = counts
        if few is None or many is None or many <= few:
            return WordLengths(tokens_per_word=1.0, num_extra=0.0)
        tokens_per_word = (many - few) / (PROBES[1] - PROBES[0])
        return WordLengths(tokens_per_word=tokens_per_word, num_extra=few - tokens_per_word * PROBES[0])


@dataclass(frozen=True, kw_only=True)
class WordLengths:
    """A prompt of `n` words has `n * tokens_per_word + num_extra` tokens, more or less."""

    tokens_per_word: float
    num_extra: float
    """Tokens of the chat template."""

    def in_words(self, shapes: Sequence[Shape]) -> list[Shape]:
        """The same prompts, their lengths in words instead of tokens. The template belongs to the beginning."""
        return [self._in_words(shape) for shape in shapes]

    def _in_words(self, shape: Shape) -> Shape:
        num_input = max(1, round((shape.num_input - self.num_extra) / self.tokens_per_word))
        if shape.prefix is None:
            return replace(shape, num_input=num_input)
        num_prefix = max(1, round((shape.num_prefix - self.num_extra) / self.tokens_per_word))
        return replace(shape, num_input=max(num_input, num_prefix), num_prefix=num_prefix)


async def open_target(
    client: HttpClient, *, endpoint: str, model: str | None, temperature: float, ignore_eos: bool, timeout: float
) -> Target:
    """The model of this name, or else the first one that the server has.

    Raises `UserError` if it is not there, or the endpoint is of another kind, and `Unavailable` if no server answers.
    """
    if not endpoint.startswith("/") or not endpoint.endswith(COMPLETIONS):
        raise UserError(f"--endpoint {endpoint}: expected /v1{COMPLETIONS} or /v1{CHAT}")
    return Target(
        client=client,
        endpoint=endpoint,
        model=await _find_model(client, model),
        temperature=temperature,
        ignore_eos=ignore_eos,
        timeout=timeout,
    )


async def _find_model(client: HttpClient, wanted: str | None) -> ServedModel:
    reply = await client.get("/v1/models", timeout=LOOK_UP_SECONDS)
    if reply.status in (401, 403):
        raise UserError(f"the server at {client.url} wants an API key: give it with --api-key or OPENAI_API_KEY")
    cards = _cards(reply.body) if reply.status == 200 else []
    if not cards:
        if wanted is None:
            raise UserError(f"{client.url}/v1/models lists no models ({reply.status}): name one with --model")
        return ServedModel(name=wanted, max_model_len=None, vocab_size=None)
    card = next((card for card in cards if wanted in (None, card["id"])), None)
    if card is None:
        names = ", ".join(str(card["id"]) for card in cards)
        raise UserError(f"--model {wanted}: not served at {client.url}; served there: {names}")
    longest, root = card.get("max_model_len"), card.get("root")
    return ServedModel(
        name=str(card["id"]),
        max_model_len=longest if isinstance(longest, int) else None,
        vocab_size=vocab_size_of(Path(root)) if isinstance(root, str) else None,
    )


def _cards(body: bytes) -> list[dict[str, Any]]:
    try:
        return [card for card in json.loads(body)["data"] if "id" in card]
    except (ValueError, KeyError, TypeError):
        return []
