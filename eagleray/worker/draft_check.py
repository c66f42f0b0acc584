"""The check of drafts: a row with drafts samples one token after the other, until one differs from the draft.

The model has computed logits behind the row's last known token and behind each of its drafts. A draw depends on the
seed, the position and the tokens before alone, so the token that is drawn from the logits behind a draft is the row's
next token if all tokens before equal their drafts. The rows take turns: in round 0 every row of the step samples its
first token as usual, in round j the rows do whose first j tokens equal their drafts. Each round is a choice of tokens
like that of a step, so penalties, bad words, grammars and whatever else depends on the tokens before see all of them,
and no state has to be taken back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.messages.outputs import TokenLogprobs
from eagleray.worker.input_batch import IntArray
from eagleray.worker.sampler import Sampled, TokenSampler


@dataclass(frozen=True, slots=True)
class Checked:
    """Tokens that rows with drafts sampled after their first ones."""

    token_ids: dict[int, list[int]]
    logprobs: dict[int, list[TokenLogprobs]]
    """Log-probabilities of these tokens by row, for the rows that asked for them."""
    mask_seconds: float = 0.0
    """Time for the masks of grammars."""


class DraftCheck:
    """The rows that sample in a step, [n], and the drafts of some of them."""

    def __init__(
        self, rows: IntArray, positions: IntArray, num_drafts: IntArray, drafts: Mapping[int, list[int]]
    ) -> None:
        """`positions` [n]: those of the rows' first tokens. `num_drafts` [n]: lengths of `drafts`, which are by row."""
        self._rows = rows
        self._positions = positions
        self._num_drafts = num_drafts
        self._drafts = drafts
        self._rounds = [np.flatnonzero(num_drafts >= number) for number in range(1 + int(num_drafts.max()))]
        """Indices of the rows that may take part in each round."""

    @property
    def rows_without(self) -> IntArray:
        """The rows that have no drafts."""
        return self._rows[self._num_drafts == 0]

    def lines(self, query_end_loc: IntArray) -> IntArray:
        """Return the index in the batch of each token behind which a token is sampled, round after round.
        `query_end_loc` [n]: index behind each row's last token in the batch."""
        first = query_end_loc - 1 - self._num_drafts
        return np.concatenate([first[indices] + number for number, indices in enumerate(self._rounds)])

    def first_logits(self, logits: Tensor) -> Tensor:
        """Return the logits of round 0 among those of all `lines`."""
        return logits[: len(self._rows)]

    def run(self, logits: Tensor, sampled: Sampled, sampler: TokenSampler[Any]) -> Checked:
        """Sample the tokens of all rounds after round 0, in which the rows `sampled`. logits: those of all `lines`.

        A row that fails in a later round, or whose text is complete there, just stops: its next step samples the same
        token first, and reports it.
        """
        token_ids: dict[int, list[int]] = {}
        logprobs: dict[int, list[TokenLogprobs]] = {}
        mask_seconds, offset = 0.0, len(self._rows)
        for number, indices in enumerate(self._rounds[1:], 1):
            last = dict(zip(sampled.rows, sampled.token_ids, strict=True))
            rows = self._rows[indices].tolist()
            going = [at for at, row in enumerate(rows) if last.get(row) == self._drafts[row][number - 1]]
            if not going:
                break
            own = logits[offset : offset + len(rows)]
            if len(going) < len(rows):
                own = own[torch.tensor(going, device=logits.device)]
            plan = sampler.prepare(self._rows[indices[going]], self._positions[indices[going]] + number)
            words = torch.from_numpy(plan.words).to(logits.device)
            sampled = sampler.launch(own, plan, words).finish([])
            for row, token_id in zip(sampled.rows, sampled.token_ids, strict=True):
                token_ids.setdefault(row, []).append(token_id)
            for row, report in sampled.logprobs.items():
                logprobs.setdefault(row, []).append(report)
            mask_seconds += sampled.mask_seconds
            offset += len(rows)
        return Checked(token_ids, logprobs, mask_seconds)
