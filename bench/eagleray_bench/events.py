"""Streamed answers as they arrive: server-sent events, and the fields of OpenAI's API in them.

Events are parsed while the clock runs, so each one costs little: bytes are split once, and of the JSON only the few
fields that count are decoded. HTTP clients' own line iterators do not fit, because they also end lines at characters
such as U+2028, which JSON may contain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

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
    """Splits the bytes of a stream, wherever reads cut them, into the data of its events."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, part: bytes) -> Iterator[bytes]:
        """Yield the data of each event that `part` completes."""
        lines = (self._rest + part).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:].strip())
            elif line in (b"", b"\r") and self._data:
                yield b"\n".join(self._data)
                self._data.clear()


class StreamedAnswer:
    """The answer to one request, with the times at which its tokens arrived."""

    def __init__(self) -> None:
        self.token_times: list[float] = []
        """Arrival of each event with tokens; the events of one read have the same time."""
        self.num_prompt_tokens: int | None = None
        """Number that the server reported; None if it reported none."""
        self.num_output_tokens: int | None = None
        self.num_cached_tokens = 0
        self.is_done = False
        """Whether the stream announced its end."""
        self._splitter = EventSplitter()
        self._finish_reason: str | None = None
        self._failure: str | None = None

    def feed(self, part: bytes, now: float) -> None:
        """Add a part of the body that was read at `now`. Never raises: errors in it appear as `failure`."""
        for data in self._splitter.feed(part):
            if data == DONE:
                self.is_done = True
            elif self._failure is None:
                self._add_event(data, now)

    @property
    def failure(self) -> str | None:
        """Reason why this is no complete answer; None if it is one."""
        if self._failure is not None:
            return self._failure
        if not self.is_done:
            return "the stream ended before its end was announced"
        if self._finish_reason not in GOOD_ENDS:
            return f"the answer ended with finish reason {self._finish_reason!r}"
        return None if self.token_times else "the answer has no tokens"

    def _add_event(self, data: bytes, now: float) -> None:
        try:
            event = DECODE(data)
        except msgspec.MsgspecError as error:
            self._failure = f"an event that cannot be read: {error}"
            return
        if event.error:
            self._failure = f"error in the stream: {error_message(event.error)}"
            return
        if event.usage is not None:
            self._set_counts(event.usage)
        for choice in event.choices or ():
            if choice.finish_reason is not None:
                self._finish_reason = choice.finish_reason
            if _has_tokens(choice):
                self.token_times.append(now)

    def _set_counts(self, usage: _Usage) -> None:
        self.num_prompt_tokens = usage.prompt_tokens
        self.num_output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.num_cached_tokens = usage.prompt_tokens_details.cached_tokens or 0


def error_message(error: Any) -> str:
    """Return the text of an `error` field: servers put an object with a message there, or the message."""
    return str(error["message"]) if isinstance(error, dict) and "message" in error else str(error)


def _has_tokens(choice: _Choice) -> bool:
    """Whether an event carries tokens.

    Each event of a completion does, though its text may be incomplete; a chat's first event may have the role only.
    """
    if choice.delta is None:
        return choice.text is not None
    return bool(choice.delta.content or choice.delta.reasoning_content)
