"""Grammars of rows: a matcher for each row that has one, and the masks of a step.

Masks are computed in threads, while the model computes the logits that they apply to. Owned by a sampler, which adds
and frees rows and has the matchers accept the tokens that were chosen.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eagleray.grammars.matcher import Matcher, mask_words
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
    """[m] indices into the rows of the step"""
    matchers: dict[int, Matcher]
    """Matchers by row, in the order of `indices`."""

    def accept(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Go on by the tokens that the step chose for `rows` [n]. A row that failed is not among them."""
        for row, token_id in zip(rows, token_ids, strict=True):
            if (matcher := self.matchers.get(row)) is not None:
                matcher.accept([token_id])


class GrammarRows:
    """`num_threads`: number of threads that compute masks. One leaves the most cores to a model on the same CPU."""

    def __init__(self, grammars: WorkerGrammars, *, vocab_size: int, num_threads: int = 1) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        self._matchers: dict[int, Matcher] = {}
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
        self.has_rows = True

    def free_row(self, row: int) -> None:
        """Drop the row's matcher. Does nothing for a row without one."""
        self._matchers.pop(row, None)
        self.has_rows = bool(self._matchers)

    def select(self, rows: IntArray) -> MatchedRows | None:
        """Return those of `rows` [n] that have a grammar, or None if none has."""
        found = [(index, row) for index, row in enumerate(rows.tolist()) if row in self._matchers]
        if not found:
            return None
        return MatchedRows(np.array([index for index, _ in found]), {row: self._matchers[row] for _, row in found})

    def begin_masks(self, rows: MatchedRows) -> PendingMasks:
        """Begin to compute the masks of `rows`, whose matchers must have accepted all tokens before."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix="grammar-masks")
        matchers = list(rows.matchers.values())
        masks = np.empty((len(matchers), mask_words(self._vocab_size)), dtype=np.int32)
        size = max(MIN_MASKS_OF_THREAD, -(-len(matchers) // self._num_threads))
        parts = [
            self._threads.submit(_fill, matchers[begin : begin + size], masks[begin : begin + size])
            for begin in range(0, len(matchers), size)
        ]
        return PendingMasks(rows, masks, parts)


class PendingMasks:
    """Masks that are being computed."""

    def __init__(self, rows: MatchedRows, masks: Masks, parts: Sequence[Future[_Filled]]) -> None:
        self.rows = rows
        self.seconds = 0.0
        """Time of all threads for these masks, once they have been waited for."""
        self._masks = masks
        self._parts = parts

    def wait(self) -> tuple[Masks, dict[int, str]]:
        """Return the masks [m, mask_words(vocab_size)], and reasons why matchers failed, by index into the step."""
        filled = [part.result() for part in self._parts]
        self.seconds = sum(part.seconds for part in filled)
        reasons = [reason for part in filled for reason in part.failures]
        by_index = zip(self.rows.indices.tolist(), reasons, strict=True)
        return self._masks, {index: reason for index, reason in by_index if reason is not None}


class _Filled(NamedTuple):
    failures: list[str | None]
    """Reason why each matcher failed, None for one that did not."""
    seconds: float


def _fill(matchers: Sequence[Matcher], masks: Masks) -> _Filled:
    """Fill the masks [m, words], one for each matcher; that of a matcher that failed allows nothing."""
    begun_at = time.perf_counter()
    reasons = []
    for matcher, mask in zip(matchers, masks, strict=True):
        matcher.fill_mask(mask)
        if matcher.failure is not None:
            mask[:] = 0
        reasons.append(matcher.failure)
    return _Filled(reasons, time.perf_counter() - begun_at)
