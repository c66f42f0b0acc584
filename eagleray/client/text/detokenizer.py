"""The text of one completion while it is generated, and the stop strings that end it.

Text that may turn out to be the beginning of a stop string is held back until it is clear that it is not, so no part
of a stop string is ever given out. Owned by a `Completion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eagleray.client.text.incremental_decoder import token_text
from eagleray.client.text.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """A stop string is complete."""

    stop_string: str
    num_tokens: int
    """How many of the tokens just pushed it took; those after them do not count."""


class Detokenizer:
    """`stop_strings` end the text, but none that is complete before the sequence has `min_tokens` tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._source = token_text(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings = stop_strings
        self._include_stop_string = include_stop_string
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._released: list[str] = []
        self._held = ""
        """Certain text that may be the beginning of a stop string."""
        self._num_ignored = 0
        """A stop string that ends within the first this many characters of `_held` came before `min_tokens`."""

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """These tokens are next. If a stop string is complete, the text has ended with it."""
        if not self._stop_strings:
            self._released.append(self._source.push(token_ids))
            return None
        for place, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._held += self._source.push([token_id])
            if stop_string := self._look_for_stop():
                return StopMatch(stop_string, place + 1)
        return None

    def flush(self) -> None:
        """The text has ended without a stop string: nothing is held back any longer."""
        self._released.append(self._held + self._source.flush())
        self._held = ""

    def pop_text(self) -> str:
        """The text that was released since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _look_for_stop(self) -> str | None:
        text = self._held + self._source.pending()
        if self._num_tokens < self._min_tokens:
            self._num_ignored = len(text)
        elif found := self._first_match(text):
            start, stop_string = found
            end = start + len(stop_string) if self._include_stop_string else start
            self._released.append(text[:end])
            self._held = ""
            return stop_string
        self._release()
        return None

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """The stop string that ends first: the one that reading character by character would find."""
        matches = []
        for stop_string in self._stop_strings:
            start = text.find(stop_string, max(0, self._num_ignored - len(stop_string) + 1))
            if start >= 0:
                matches.append((start + len(stop_string), start, stop_string))
        return min(matches)[1:] if matches else None

    def _release(self) -> None:
        """Let go of all but the longest end of the text that a stop string begins with."""
        num_held = max(_overlap(self._held, stop_string) for stop_string in self._stop_strings)
        num_released = len(self._held) - num_held
        self._released.append(self._held[:num_released])
        self._held = self._held[num_released:]
        self._num_ignored = max(0, self._num_ignored - num_released)


def _overlap(text: str, stop_string: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop_string`."""
    for length in range(min(len(text), len(stop_string) - 1), 0, -1):
        if text.endswith(stop_string[:length]):
            return length
    return 0
