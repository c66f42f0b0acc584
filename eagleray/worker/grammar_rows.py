"""Grammars of rows: a matcher for each row that has one, and the masks of a step.

While the model computes logits, threads have the matchers accept the tokens of the step before, and compute the masks
that apply to these logits. Owned by a sampler, which adds and frees rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.grammars.matcher import Matcher, TokenMask, mask_words
from eagleray.messages.sampling import Sampling
from eagleray.worker.grammars import WorkerGrammars
from eagleray.worker.thinking import ThinkingMatcher
from eagleray.worker.token_table import IntArray

Masks = npt.NDArray[np.int32]

MIN_MASKS_OF_THREAD = 8
"""Fewer masks are computed sooner than another thread wakes."""


@dataclass(frozen=True, slots=True)
class MatchedRows:
    """The rows of a step that have a grammar. Their matchers are those of the requests that the step computes, even if
    other requests have the rows by the time its tokens are known."""

    indices: IntArray
    """[m] indices into the rows of the step, in ascending order"""
    matchers: dict[int, Matcher]
    """Matchers by row, in the order of `indices`."""
    masks: Masks
    """[m, mask_words(vocab_size)], which every step with these rows overwrites"""
    mask_of_each: list[TokenMask]
    """The rows of `masks`."""


class GrammarRows:
    """`num_threads`: number of threads that compute masks. One leaves the most cores to a model on the same CPU."""

    def __init__(self, grammars: WorkerGrammars, *, vocab_size: int, num_threads: int = 1) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._matchers: dict[int, Matcher] = {}
        self._tokens: dict[int, int] = {}
        """Last token of each row, which its matcher accepts before the next mask."""
        self._selected: tuple[bytes, MatchedRows | None] | None = None
        """The last selection and its rows, until a row is added or freed."""
        self._threads: ThreadPoolExecutor | None = None  # made when first needed
        self.has_rows = False
        """Whether a row has a grammar, for callers that do nothing otherwise."""

    def add_row(self, row: int, sampling: Sampling, generated: Sequence[int]) -> None:
        """Follow the thinking and the grammar of this row, which has generated these tokens before."""
        matcher = None if sampling.grammar is None else self._grammars.get(sampling.grammar).matcher()
        if sampling.thinking is not None:
            matcher = ThinkingMatcher(sampling.thinking, matcher)
        assert matcher is not None
        matcher.accept(generated)
        self._matchers[row] = matcher
        self._tokens.pop(row, None)
        self._selected = None
        self.has_rows = True

    def free_row(self, row: int) -> None:
        """Drop the row's matcher. Does nothing for a row without one."""
        self._matchers.pop(row, None)
        self._tokens.pop(row, None)
        self._selected = None
        self.has_rows = bool(self._matchers)

    def select(self, rows: IntArray) -> MatchedRows | None:
        """Return those of `rows` [n] that have a grammar, or None if none has."""
        key = rows.tobytes()
        if self._selected is None or self._selected[0] != key:
            self._selected = key, self._select(rows)
        return self._selected[1]

    def _select(self, rows: IntArray) -> MatchedRows | None:
        found = [(index, row) for index, row in enumerate(rows.tolist()) if row in self._matchers]
        if not found:
            return None
        masks = np.empty((len(found), mask_words(self._vocab_size)), dtype=np.int32)
        matchers = {row: self._matchers[row] for _, row in found}
        return MatchedRows(np.array([index for index, _ in found]), matchers, masks, list(masks))

    def accept(self, matched: MatchedRows, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Go on by the tokens that a step chose for `rows` [n], of which `matched` have a grammar. A row that failed is
        not among `rows`. The matchers accept the tokens when the next masks are computed."""
        for row, token_id in zip(rows, token_ids, strict=True):
            matcher = matched.matchers.get(row)
            if matcher is not None and self._matchers.get(row) is matcher:
                self._tokens[row] = token_id

    def copy_matchers(self, rows: Sequence[int]) -> dict[int, Matcher]:
        """Return copies of the matchers of those of `rows` that have one, behind all of their tokens. No masks may be
        under way."""
        copies = {row: self._matchers[row].copy() for row in rows if row in self._matchers}
        for row, matcher in copies.items():
            if row in self._tokens:
                matcher.accept([self._tokens[row]])
        return copies

    def begin_masks(self, rows: MatchedRows) -> PendingMasks:
        """Begin to compute the masks of `rows`, after the last tokens that `accept` was given."""
        matchers = list(rows.matchers.values())
        tokens = [self._tokens.pop(row, None) for row in rows.matchers]
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-masks")
        size = max(MIN_MASKS_OF_THREAD, -(-len(matchers) // self._num_threads))
        parts = []
        for begin in range(0, len(matchers), size):
            own = slice(begin, begin + size)
            parts.append(self._threads.submit(_advance, matchers[own], tokens[own], rows.mask_of_each[own]))
        return PendingMasks(rows, parts)


class PendingMasks:
    """Masks that are being computed."""

    def __init__(self, rows: MatchedRows, parts: Sequence[Future[_Filled]]) -> None:
        self.rows = rows
        self.seconds = 0.0
        """Time of all threads for these masks, once they have been waited for."""
        self._parts = parts

    def wait(self) -> tuple[Masks, dict[int, str]]:
        """Return the masks [m, mask_words(vocab_size)], which the next masks of these rows overwrite, and reasons why
        matchers failed, by index into the step."""
        filled = [part.result() for part in self._parts]
        self.seconds = sum(part.seconds for part in filled)
        reasons = [reason for part in filled for reason in part.failures]
        if not any(reasons):
            return self.rows.masks, {}
        by_index = zip(self.rows.indices.tolist(), reasons, strict=True)
        return self.rows.masks, {index: reason for index, reason in by_index if reason is not None}


class _Filled(NamedTuple):
    failures: list[str | None]
    """Reason why each matcher failed, None for one that did not."""
    seconds: float


def _advance(matchers: Sequence[Matcher], tokens: Sequence[int | None], masks: Sequence[TokenMask]) -> _Filled:
    """Have each matcher accept its token, if there is one, then fill its mask. The mask of a matcher that failed allows
    nothing."""
    begun_at = time.perf_counter()
    reasons = []
    for matcher, token_id, mask in zip(matchers, tokens, masks, strict=True):
        if token_id is not None:
            matcher.accept([token_id])
        matcher.fill_mask(mask)
        if (failure := matcher.failure) is not None:
            mask[:] = 0
        reasons.append(failure)
    return _Filled(reasons, time.perf_counter() - begun_at)
