"""The text of a growing sequence of tokens, piece by piece.

The pieces of a sequence, joined, equal the tokenizer's `decode` of the whole of it, however the sequence was cut. So
a piece is given out only when no later token can change it: an incomplete character waits for its other bytes.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import Protocol

from eagleray.client.text.tokenizer import CLEAN_UPS, Tokenizer

REPLACEMENT = "\ufffd"
CLEAN_UP_BEGINS = re.compile(
    "(?:" + "|".join(re.escape(old[:n]) for old, _ in CLEAN_UPS for n in range(1, len(old))) + r")\Z"
)
"""Text whose end a clean-up might take for the beginning of what it replaces."""


class IncrementalDecoder(Protocol):
    """Text of the tokens of one sequence."""

    def push(self, token_ids: Sequence[int]) -> str:
        """These tokens are next. The text that has become certain."""

    def pending(self) -> str:
        """What `flush` would give, if that is text and not a part of a character."""

    def flush(self) -> str:
        """There is no next token. The rest of the text; bytes that are no character become U+FFFD."""


def token_text(tokenizer: Tokenizer, *, skip_special_tokens: bool) -> IncrementalDecoder:
    """For a new sequence."""
    if tokenizer.is_byte_level and not tokenizer.cleans_up:
        return _ByteText(tokenizer, skip_special_tokens)
    return _WindowText(tokenizer, skip_special_tokens)


class _ByteText:
    """Byte-level tokenizers: the text is the tokens' bytes, decoded as UTF-8."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        bytes_of, is_special = self._tokenizer.token_bytes, self._tokenizer.is_special
        if self._skip_special_tokens:
            token_ids = [token_id for token_id in token_ids if not is_special(token_id)]
        return self._utf8.decode(b"".join(map(bytes_of, token_ids)))

    def pending(self) -> str:
        return ""  # what is held back is never a whole character

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Any tokenizer: decode the new tokens behind the one before them, and see what they add.

    A run of byte-fallback tokens is either all valid or all replaced, so it is certain only when another token ends it.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        """The last token whose text was given out: decoders treat a token by whether it is the first one, and by what
        the one before it is."""
        self._context_length = 0
        """Of its text."""
        self._held: list[int] = []
        """The tokens after it."""
        self._num_closed = 0
        """How many of the held tokens there are without a run of bytes at the end, which might go on."""

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
        """Hold these too. Whether one of them ends what was open before."""
        for count in range(len(token_ids), 0, -1):
            token_id = token_ids[count - 1]
            if not self._is_invisible(token_id) and self._tokenizer.byte_of(token_id) is None:
                self._num_closed = len(self._held) + count
                self._held += token_ids
                return True
        self._held += token_ids
        return False

    def _is_invisible(self, token_id: int) -> bool:
        skipped = self._skip_special_tokens and self._tokenizer.is_special(token_id)
        return skipped or not self._tokenizer.is_token(token_id)

    def _text_of(self, token_ids: list[int]) -> str:
        """What these tokens add to the text of the context."""
        return self._decode(self._context + token_ids)[self._context_length :] if token_ids else ""

    def _move(self, count: int) -> None:
        """The text of the first `count` held tokens is given out."""
        given, self._held = self._held[:count], self._held[count:]
        self._num_closed = 0
        self._context = given[-1:]
        self._context_length = len(self._decode(self._context))

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode_raw(token_ids, skip_special_tokens=self._skip_special_tokens)
