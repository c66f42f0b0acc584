"""Scores of given token ids at positions of a prompt: the fields `prompt_logprob_token_ids` and `prompt_logprob_start`.

Pure. An engine scores a row of ids at every position; the client cuts off the rows before the first, and replaces the
scores of padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagleray.errors import InvalidRequest
from eagleray.messages.arrays import Array
from eagleray.messages.sampling import SamplingParams

PADDING = -1
FIELD = "prompt_logprob_token_ids"


class PromptScores:
    """The ids that a request asks for: `token_ids`, int32 [num_rows, num_ids] with `PADDING`, where row i is about the
    prompt's token `start` + i + 1."""

    def __init__(self, token_ids: Array, start: int) -> None:
        self._token_ids = token_ids
        self._start = start

    @classmethod
    def of(
        cls, params: SamplingParams, *, num_prompt_tokens: int, vocab_size: int, max_ids: int
    ) -> PromptScores | None:
        """Return the requested scores, or None. `max_ids`: largest number of ids of a row. Raises `InvalidRequest`."""
        if params.prompt_logprob_token_ids is None or len(params.prompt_logprob_token_ids) == 0:
            return None
        rows, start = params.prompt_logprob_token_ids, params.prompt_logprob_start or 0
        num_rows = max(0, num_prompt_tokens - 1 - start)
        if len(rows) != num_rows:
            raise InvalidRequest(
                f"`{FIELD}` has {len(rows)} rows, but it must have {num_rows}: one for each of the prompt's "
                f"{num_prompt_tokens} tokens but the first, and without those of `prompt_logprob_start` ({start})",
                param=FIELD,
            )
        return cls(_matrix(rows, vocab_size, max_ids), start)

    @property
    def num_ids(self) -> int:
        """Number of ids of every row."""
        return int(self._token_ids.shape[1])

    def of_all_positions(self) -> tuple[tuple[int, ...], ...]:
        """Return a row for each token of the prompt but the first, whose ids exist."""
        unused = np.zeros((self._start, self.num_ids), dtype=np.int32)
        ids = np.concatenate([unused, self._token_ids.clip(min=0)])
        return tuple(map(tuple, ids.tolist()))

    def select(self, scores: Array) -> Array:
        """Return float32 [num_rows, num_ids] of the scores of all positions: minus infinity for padding."""
        own = scores[self._start :].astype(np.float32)
        own[self._token_ids == PADDING] = -np.inf
        return own


def _matrix(rows: Sequence[Any], vocab_size: int, max_ids: int) -> Array:
    """Return the rows as int32 [num_rows, num_ids], filled up with padding. Raises `InvalidRequest`."""
    try:
        num_ids = max(map(len, rows))
    except TypeError:
        raise InvalidRequest(f"`{FIELD}` must be a list of lists of token ids", param=FIELD) from None
    if not 1 <= num_ids <= max_ids:
        raise InvalidRequest(
            f"`{FIELD}` must have between 1 and {max_ids} ids in a row (the option `max_logprobs`), but it has "
            f"{num_ids}",
            param=FIELD,
        )
    matrix = np.full((len(rows), num_ids), PADDING, dtype=np.int32)
    for row, ids in zip(matrix, rows, strict=True):
        for token_id in ids:
            if not (isinstance(token_id, int | np.integer) and PADDING <= token_id < vocab_size):
                raise InvalidRequest(
                    f"`{FIELD}`: {token_id!r:.50} is not a token id; they go from 0 to {vocab_size - 1}, and "
                    f"{PADDING} stands for none",
                    param=FIELD,
                )
        row[: len(ids)] = ids
    return matrix
