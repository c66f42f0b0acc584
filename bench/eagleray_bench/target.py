"""The model that `eagleray bench serve` loads: finds it behind a URL and writes requests for it.

Requests use OpenAI's API and nothing else but `ignore_eos`, which vLLM and eagleray have.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from eagleray.errors import EagleRayError, UserError
from eagleray_bench.http_client import HttpClient
from eagleray_bench.lengths import RequestShape
from eagleray_bench.load import CompletedRequest, FailedRequest, send_request
from eagleray_bench.workload import BenchRequest, as_text, vocab_size_of

COMPLETIONS, CHAT = "/completions", "/chat/completions"
LOOK_UP_SECONDS = 30.0
PROBES = (8, 40)
"""Numbers of words in the two prompts that show how many tokens a word has."""
PROBE_STRIDE = 7
"""Distance between the probes' words: neighbouring words have a letter in common."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that a server lists."""

    name: str
    max_model_len: int | None
    """Maximum length in tokens; None if the server does not give it."""
    vocab_size: int | None
    """Size of the vocabulary; None unless the server's checkpoint is on this machine."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """An endpoint of a server, with one of its models."""

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

    def body(self, request: BenchRequest) -> bytes:
        """Return the HTTP body that asks to complete the prompt's token ids, or a chat with a word for each of them."""
        fields: dict[str, Any] = {"model": self.model.name}
        if self.is_chat:
            fields["messages"] = [{"role": "user", "content": as_text(request.prompt)}]
        else:
            fields["prompt"] = request.prompt
        fields |= {
            "max_tokens": request.num_output,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)

    async def send_first(self, request: BenchRequest) -> CompletedRequest:
        """Send a request before the load. Raises `EagleRayError` with the cause if it fails."""
        outcome = await send_request(self.client, self.endpoint, self.body(request), timeout=self.timeout)
        if isinstance(outcome, FailedRequest):
            raise EagleRayError(f"the first request to {self.client.url}{self.endpoint} failed: {outcome.cause}")
        return outcome

    async def word_lengths(self) -> WordLengths:
        """Measure how many tokens words become: only the server has the tokenizer and the chat template."""
        counts = []
        for num_words in PROBES:
            words = [PROBE_STRIDE * word for word in range(num_words)]
            counts.append((await self.send_first(BenchRequest(words, num_output=1))).num_prompt_tokens)
        few, many = counts
        if few is None or many is None or many <= few:
            return WordLengths(tokens_per_word=1.0, num_extra=0.0)
        tokens_per_word = (many - few) / (PROBES[1] - PROBES[0])
        return WordLengths(tokens_per_word=tokens_per_word, num_extra=few - tokens_per_word * PROBES[0])


@dataclass(frozen=True, kw_only=True)
class WordLengths:
    """Estimate of lengths: a prompt of `n` words has about `n * tokens_per_word + num_extra` tokens."""

    tokens_per_word: float
    num_extra: float
    """Tokens of the chat template."""

    def in_words(self, shapes: Sequence[RequestShape]) -> list[RequestShape]:
        """Return the same prompts with lengths in words instead of tokens. The template counts to the prefix."""
        return [self._in_words(shape) for shape in shapes]

    def _in_words(self, shape: RequestShape) -> RequestShape:
        num_input = max(1, round((shape.num_input - self.num_extra) / self.tokens_per_word))
        if shape.prefix is None:
            return replace(shape, num_input=num_input)
        num_prefix = max(1, round((shape.num_prefix - self.num_extra) / self.tokens_per_word))
        return replace(shape, num_input=max(num_input, num_prefix), num_prefix=num_prefix)


async def open_target(
    client: HttpClient, *, endpoint: str, model: str | None, temperature: float, ignore_eos: bool, timeout: float
) -> Target:
    """Return the model with this name, or else the first one that the server lists.

    Raises `UserError` if the server does not list it or the endpoint is of another kind, and `Unavailable` if no server
    answers.
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
    cards = _model_cards(reply.body) if reply.status == 200 else []
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


def _model_cards(body: bytes) -> list[dict[str, Any]]:
    try:
        return [card for card in json.loads(body)["data"] if "id" in card]
    except (ValueError, KeyError, TypeError):
        return []
