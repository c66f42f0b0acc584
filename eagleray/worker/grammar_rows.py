"""Grammars of rows: a matcher for each row that has one, and the masks of a step.

Masks are computed in a thread, while the model computes the logits that they apply to. Owned by a sampler, which adds
and frees rows and appends the tokens that were chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from eagleray.grammars.matcher import Matcher, mask_words
from eagleray.messages.sampling import Sampling
from eagleray.worker.grammars import WorkerGrammars
from eagleray.worker.thinking import ThinkingMatcher
from eagleray.worker.token_table import IntArray

Masks = npt.NDArray[np.int32]


class GrammarRows:
    def __init__(self, grammars: WorkerGrammars, *, vocab_size: int) -> None:
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._matchers: dict[int, Matcher] = {}
        self._thread: ThreadPoolExecutor | None = None  # made when first needed
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

    def begin_masks(self, rows: IntArray) -> PendingMasks | None:
        """Begin to compute the masks of `rows` [n]. Returns None if none of them has a grammar."""
        found = [(index, matcher) for index, row in enumerate(rows.tolist()) if (matcher := self._matchers.get(row))]
        if not found:
            return None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")
        masks = np.empty((len(found), mask_words(self._vocab_size)), dtype=np.int32)
        done = self._thread.submit(_fill, [matcher for _, matcher in found], masks)
        return PendingMasks(np.array([index for index, _ in found]), masks, done)

    def append_tokens(self, rows: Sequence[int], token_ids: Sequence[int]) -> None:
        """Go on by the token that was chosen for each of `rows`. Rows without a grammar are skipped."""
        for row, token_id in zip(rows, token_ids, strict=True):
            if (matcher := self._matchers.get(row)) is not None:
                matcher.accept([token_id])

    def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            self._thread.shutdown()


class PendingMasks:
    """Masks that are being computed. `indices` [m]: the rows of the step that have a grammar."""

    def __init__(self, indices: IntArray, masks: Masks, done: Future[dict[int, str]]) -> None:
        self.indices = indices
        self._masks = masks
        self._done = done

    def wait(self) -> tuple[Masks, dict[int, str]]:
        """Return the masks [m, mask_words(vocab_size)], and reasons why matchers failed, by index into the step."""
        failures = self._done.result()
        return self._masks, {int(self.indices[number]): reason for number, reason in failures.items()}


def _fill(matchers: Sequence[Matcher], masks: Masks) -> dict[int, str]:
    """Fill the masks [m, words], one for each matcher. Returns the reasons of those that failed, by number."""
    failures = {}
    for number, (matcher, mask) in enumerate(zip(matchers, masks, strict=True)):
        matcher.fill_mask(mask)
        if (reason := matcher.failure) is not None:
            failures[number] = reason
    return failures
