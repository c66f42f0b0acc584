"""The interface of a library that compiles grammars."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eagleray.messages.grammars import Grammar

TokenMask = npt.NDArray[np.int32]
"""One bit for each token of the vocabulary, set if the token is allowed; the first token is the lowest bit."""

MASK_BITS = 32


def mask_words(vocab_size: int) -> int:
    """Return the number of words of a `TokenMask`."""
    return -(-vocab_size // MASK_BITS)


def allow_only(mask: TokenMask, token_ids: Iterable[int]) -> None:
    """Let `mask` allow these tokens and no others."""
    mask.fill(0)
    allow(mask, token_ids)


def allow(mask: TokenMask, token_ids: Iterable[int]) -> None:
    """Let `mask` allow these tokens too."""
    for token_id in token_ids:
        mask[token_id // MASK_BITS] |= _bit(token_id)


def forbid(mask: TokenMask, token_ids: Iterable[int]) -> None:
    """Let `mask` forbid these tokens."""
    for token_id in token_ids:
        mask[token_id // MASK_BITS] &= ~_bit(token_id)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % MASK_BITS).view(np.int32)


class Matcher(Protocol):
    """Follows the tokens of one completion."""

    @property
    def failure(self) -> str | None:
        """Reason why the matcher can go on no longer: a token that the grammar forbids, or a limit."""
        ...

    @property
    def is_complete(self) -> bool:
        """Whether the text so far is one of the grammar's."""
        ...

    def fill_mask(self, mask: TokenMask) -> None:
        """Write the tokens that may come next into `mask`, [mask_words(vocab_size)]. Where the text is complete, these
        include the end-of-sequence tokens. Releases the GIL."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. End-of-sequence tokens are ignored."""
        ...

    def copy(self) -> Matcher:
        """Return a matcher in the same state, which goes on independently of this one."""
        ...


class CompiledGrammar(Protocol):
    """Makes matchers for completions, from any thread."""

    @property
    def num_bytes(self) -> int:
        """Memory that the grammar takes, or 0 if the library does not report it."""
        ...

    def matcher(self) -> Matcher:
        """Return a matcher at the beginning of a text."""
        ...


class GrammarCompiler(Protocol):
    """Compiles grammars for the tokens of one model, in any thread."""

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Compile the grammar. Raises `InvalidRequest` if it is wrong, has something that the library does not support,
        matches no text, or is beyond the limits."""
        ...

    def close(self) -> None:
        """Release the resources beside memory. What was compiled can be used further."""
        ...
