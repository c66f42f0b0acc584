"""The text of one completion while it is generated, and the stop strings that end it.

Text that may become a stop string is held back until it is clear that it does not, so no part of a stop string is ever
released. Owned by a `Completion`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from eagleray.client.text.incremental_decoder import new_decoder
from eagleray.client.text.tokenizer import Tokenizer


class StopMatch(NamedTuple):
    """A complete stop string."""

    stop_string: str
    num_tokens: int
    """Number of the tokens just pushed up to the end of the stop string; the tokens after them are dropped."""


class Detokenizer:
    """Decoder of one completion. `stop_strings` end the text, unless complete before there are `min_tokens` tokens."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = new_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings = stop_strings
        self._include_stop_string = include_stop_string
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._released: list[str] = []
        self._held = ""
        """Text that is certain, and may be the beginning of a stop string."""
        self._num_ignored = 0
        """Number of first characters of `_held` from before `min_tokens`: no stop string that ends there counts."""

    def push(self, token_ids: Sequence[int]) -> StopMatch | None:
        """Append tokens. Returns the stop string that is complete and has ended the text, if there is one."""
        if not self._stop_strings:
            self._released.append(self._decoder.push(token_ids))
            return None
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            self._held += self._decoder.push([token_id])
            if stop_string := self._find_stop():
                return StopMatch(stop_string, count)
        return None

    def flush(self) -> None:
        """Release all held text, because the completion has ended without a stop string."""
        self._released.append(self._held + self._decoder.flush())
        self._held = ""

    def pop_text(self) -> str:
        """Return the text that was released since the last call."""
        text = "".join(self._released)
        self._released.clear()
        return text

    def _find_stop(self) -> str | None:
        text = self._held + self._decoder.pending()
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
        """Return the position and the text of the stop string that a scan by characters would find first."""
        matches = []
        for stop_string in self._stop_strings:
            start = text.find(stop_string, max(0, self._num_ignored - len(stop_string) + 1))
            if start >= 0:
                matches.append((start + len(stop_string), start, stop_string))
        return min(matches)[1:] if matches else None

    def _release(self) -> None:
        """Release the held text except for its longest suffix that is a prefix of a stop string."""
        num_held = max(_overlap(self._held, stop_string) for stop_string in self._stop_strings)
        num_released = len(self._held) - num_held
        self._released.append(self._held[:num_released])
        self._held = self._held[num_released:]
        self._num_ignored = max(0, self._num_ignored - num_released)


def _overlap(text: str, stop_string: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop_string`."""
    for length in range(min(len(text), len(stop_string) - 1), 0, -1):
        if text.endswith(stop_string[:length]):
            return length
    return 0
