"""The text of one completion while it is generated, and the stop strings that end it. Owned by a `Completion`.

A decoder turns tokens into text, piece by piece. The pieces, joined, equal the tokenizer's `decode` of the whole
sequence, however the sequence was cut. So a piece is released only when no later token can change it: an incomplete
character waits for its other bytes. Text that may become a stop string is held back too, until it is clear that it does
not, so no part of a stop string is ever released.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from eagleray.client.text.tokenizer import CLEAN_UPS, Tokenizer

REPLACEMENT = "\ufffd"
CLEAN_UP_BEGINS = re.compile(
    "(?:" + "|".join(re.escape(old[:n]) for old, _ in CLEAN_UPS for n in range(1, len(old))) + r")\Z"
)
"""Matches text whose end may be the beginning of a string that `clean_up` replaces."""


class StopMatch(NamedTuple):
    """A complete stop string."""

    stop_string: str
    num_tokens: int
    """Number of the tokens just pushed up to the end of the stop string; the tokens after them are dropped."""


class Detokenizer:
    """Decoder of one completion. `stop_strings` end the text, unless complete before there are `min_tokens` tokens.

    `kept_special_ids`: special tokens that the text has although `skip_special_tokens` leaves the others out.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool,
        kept_special_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        include_stop_string: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = new_decoder(
            tokenizer, skip_special_tokens=skip_special_tokens, kept_special_ids=kept_special_ids
        )
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


class IncrementalDecoder(Protocol):
    """Decoder of one sequence of tokens."""

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens, and return the text that has become certain."""

    def pending(self) -> str:
        """Return the text that `flush` would, or nothing if that holds a part of a character."""

    def flush(self) -> str:
        """Return the rest of the text after the last token. Bytes that are no character become U+FFFD."""


def new_decoder(
    tokenizer: Tokenizer, *, skip_special_tokens: bool, kept_special_ids: Collection[int] = ()
) -> IncrementalDecoder:
    """Return the decoder of a new sequence. `kept_special_ids`: see `Detokenizer`."""
    skipped = tokenizer.special_ids.difference(kept_special_ids) if skip_special_tokens else frozenset[int]()
    if tokenizer.is_byte_level and not tokenizer.cleans_up:
        return _ByteDecoder(tokenizer, skipped)
    return _WindowDecoder(tokenizer, skipped)


class _ByteDecoder:
    """Decoder for byte-level tokenizers: the text is the tokens' bytes, decoded as UTF-8.

    `skipped`: tokens that the text does not have.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of = self._tokenizer.token_bytes
        return self._utf8.decode(b"".join(map(bytes_of, _without(self._skipped, token_ids))))

    def pending(self) -> str:
        return ""  # the bytes that are held back are never a whole character

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for any tokenizer: decodes the new tokens after the one before them, and compares.

    A run of byte-fallback tokens is either all valid or all replaced, so it is certain only when another token ends it.
    `skipped`: tokens that the text does not have.
    """

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._context: list[int] = []
        """The last token whose text was released: decoders treat a token differently if it is the first one, and
        according to the token before it."""
        self._context_length = 0
        """Length of the text of `_context`."""
        self._held: list[int] = []
        """The tokens after `_context`."""
        self._num_closed = 0
        """Number of held tokens without a run of bytes at the end, which the next token might continue."""

    def push(self, token_ids: Sequence[int]) -> str:
        if not self._append(token_ids):
            return ""
        text = self._text_of(self._held[: self._num_closed])
        if not text or text.endswith(REPLACEMENT) or (self._tokenizer.cleans_up and CLEAN_UP_BEGINS.search(text)):
            return ""
        self._move(self._num_closed)
        return self._tokenizer.clean_up(text)

    def pending(self) -> str:
        text = self._text_of(self._held)
        return "" if REPLACEMENT in text else self._tokenizer.clean_up(text)

    def flush(self) -> str:
        text = self._text_of(self._held)
        self._move(len(self._held))
        return self._tokenizer.clean_up(text)

    def _append(self, token_ids: Sequence[int]) -> bool:
        """Hold more tokens, and return whether one of them ends an open run of bytes."""
        for count in range(len(token_ids), 0, -1):
            token_id = token_ids[count - 1]
            if not self._is_invisible(token_id) and self._tokenizer.byte_of(token_id) is None:
                self._num_closed = len(self._held) + count
                self._held += token_ids
                return True
        self._held += token_ids
        return False

    def _is_invisible(self, token_id: int) -> bool:
        return token_id in self._skipped or not self._tokenizer.is_token(token_id)

    def _text_of(self, token_ids: list[int]) -> str:
        """Return the text that these tokens add to the text of the context."""
        return self._decode(self._context + token_ids)[self._context_length :] if token_ids else ""

    def _move(self, count: int) -> None:
        """Stop holding the first `count` tokens, whose text is released."""
        released, self._held = self._held[:count], self._held[count:]
        self._num_closed = 0
        self._context = released[-1:]
        self._context_length = len(self._decode(self._context))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_raw(_without(self._skipped, token_ids), skip_special_tokens=False)


def _without(skipped: frozenset[int], token_ids: Sequence[int]) -> Sequence[int]:
    return [token_id for token_id in token_ids if token_id not in skipped] if skipped else token_ids
