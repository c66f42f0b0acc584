"""Grammars without texts: which tokens may come next is drawn from the tokens before."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from eagleray.grammars.matcher import MASK_BITS, CompiledGrammar, GrammarCompiler, Matcher, TokenMask
from eagleray.messages.grammars import Grammar
from eagleray.worker.grammar_rows import GrammarRows
from eagleray.worker.grammars import WorkerGrammars

TOKENS_TO_FAILURE = "9"
"""Source of a grammar, and the number of tokens after which its matchers fail."""


def random_grammar(source: str) -> Grammar:
    return Grammar(kind="regex", source=source)


class RandomMatcher(Matcher):
    """Allows a fifth of the tokens, at least one. It asserts that every token was allowed, and comes in its turn."""

    def __init__(self, source: str, vocab_size: int) -> None:
        self.source = source
        self.token_ids: list[int] = []
        self._vocab_size = vocab_size

    @property
    def failure(self) -> str | None:
        is_over = self.source == TOKENS_TO_FAILURE and len(self.token_ids) >= int(TOKENS_TO_FAILURE)
        return "the grammar has ended" if is_over else None

    @property
    def is_complete(self) -> bool:
        return False

    def allowed(self) -> np.ndarray:
        """Return bool [vocab_size]."""
        seed = zlib.crc32(repr((self.source, self.token_ids)).encode())
        rng = np.random.default_rng(seed)
        allowed = rng.random(self._vocab_size) < 0.2
        allowed[rng.integers(self._vocab_size)] = True
        return allowed

    def fill_mask(self, mask: TokenMask) -> None:
        bits = np.ones(len(mask) * MASK_BITS, dtype=np.uint8)  # those beyond the vocabulary have no meaning
        bits[: self._vocab_size] = self.allowed()
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token_id in token_ids:
            assert self.failure is not None or self.allowed()[token_id], f"{token_id} after {self.token_ids}"
            self.token_ids.append(token_id)


class RandomGrammar(CompiledGrammar):
    num_bytes = 0

    def __init__(self, source: str, vocab_size: int) -> None:
        self._source = source
        self._vocab_size = vocab_size

    def matcher(self) -> Matcher:
        return RandomMatcher(self._source, self._vocab_size)


class RandomCompiler(GrammarCompiler):
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        return RandomGrammar(grammar.source, self._vocab_size)


def worker_grammars(vocab_size: int) -> WorkerGrammars:
    return WorkerGrammars(lambda: RandomCompiler(vocab_size))


def grammar_rows(vocab_size: int, *, num_threads: int = 1) -> GrammarRows:
    return GrammarRows(worker_grammars(vocab_size), vocab_size=vocab_size, num_threads=num_threads)
