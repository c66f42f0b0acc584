"""A streamed answer as it arrives: server-sent events, and what OpenAI's API says in them.

Every event passes here while the clock runs, so each one costs as little as it can: bytes are split once, and of the
JSON only the few fields that count are decoded.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

__all__ = ["Answer", "EventSplitter"]

DONE = b"[DONE]"
GOOD_ENDS = ("stop", "length")


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


DECODE = msgspec.json.Decoder(_Event).decode


class EventSplitter:
    """Bytes in, the data of each complete event out."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line in (b"", b"\r") and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


class Answer:
    """The answer to one request, and when its tokens came."""

    def __init__(self) -> None:
        self.token_times: list[float] = []
        """When each event with tokens came: several events of one read have one time."""
        self.num_prompt_tokens: int | None = None
        """What the server counted; None if it did not say."""
        self.num_output_tokens: int | None = None
        self.num_cached_tokens = 0
        self.is_done = False
        """The end of the stream was announced."""
        self._splitter = EventSplitter()
        self._finish_reason: str | None = None
        self._failure: str | None = None

    def feed(self, chunk: bytes, now: float) -> None:
        """Bytes of the body, read at `now`. Never raises: what is wrong with them, `failure` tells."""
        for data in self._splitter.feed(chunk):
            if data == DONE:
                self.is_done = True
            elif self._failure is None:
                self._take(data, now)

    @property
    def failure(self) -> str | None:
        """Why this is no complete answer; None if it is one."""
        if self._failure is not None:
            return self._failure
        if not self.is_done:
            return "the stream ended before its end was announced"
        if self._finish_reason not in GOOD_ENDS:
            return f"the answer ended with finish reason {self._finish_reason!r}"
        return None if self.token_times else "the answer has no tokens"

    def _take(self, data: bytes, now: float) -> None:
        try:
            event = DECODE(data)
        except msgspec.MsgspecError as error:
            self._failure = f"an event that cannot be read: {error}"
            return
        if event.error:
            self._failure = f"error in the stream: {error_message(event.error)}"
            return
        if event.usage is not None:
            self._count(event.usage)
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
            if _has_tokens(choice):
                self.token_times.append(now)

    def _count(self, usage: _Usage) -> None:
        self.num_prompt_tokens = usage.prompt_tokens
        self.num_output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def error_message(error: Any) -> str:
    """What servers put under `error`: an object with a message, or the message."""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _has_tokens(choice: _Choice) -> bool:
    """A completion's events each have a token, though its text may be incomplete; a chat's first event may have the
    role only."""
    if choice.delta is None:
        return choice.text is not None
    return bool(choice.delta.content or choice.delta.reasoning_content)
