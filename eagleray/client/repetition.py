"""Detection of a completion whose end repeats one pattern of tokens.

Pure. Owned by the completion. The work for a token is in proportion to the longest pattern, whatever the tokens are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagleray.messages.sampling import RepetitionDetectionParams

NO_TOKEN = -1


class RepetitionDetector:
    """Counts, for each length of a pattern, the last tokens that equal the token one length before them.

    The completion ends with `min_count` copies of a pattern of length p if there are p x (min_count - 1) such tokens.
    """

    def __init__(self, params: RepetitionDetectionParams, *, min_tokens: int) -> None:
        sizes = np.arange(1, params.max_pattern_size + 1)
        self._needed = np.where(
            sizes >= params.min_pattern_size, sizes * (params.min_count - 1), np.iinfo(np.int64).max
        )
        self._recent = np.full(len(sizes), NO_TOKEN, dtype=np.int64)
        """[max_pattern_size] the last tokens, the newest first."""
        self._num_equal = np.zeros(len(sizes), dtype=np.int64)
        self._num_tokens = 0
        self._min_tokens = min_tokens

    def push(self, token_ids: Sequence[int]) -> int | None:
        """Append tokens. Return the number of them up to the first at which the completion is repetitive, or None."""
        for count, token_id in enumerate(token_ids, 1):
            self._num_equal += 1
            self._num_equal *= self._recent == token_id
            self._recent[1:] = self._recent[:-1]
            self._recent[0] = token_id
            self._num_tokens += 1
            if self._num_tokens >= self._min_tokens and (self._num_equal >= self._needed).any():
                return count
        return None
