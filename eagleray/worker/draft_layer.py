"""The layer of a checkpoint that predicts further tokens, as the source of drafts.

Owned by the rank that samples, and driven by its runner. The layer needs the model's hidden states, which nothing
keeps. So it computes all tokens of every step, whether any are proposed or not, and its cache, which has the blocks of
the model's, lacks none. The state at a position is computed with the token behind it. So the last state of a block that
a request finds in the prefix cache may belong to another token; that makes a proposal a little worse.

Proposed tokens behind the first one are predicted with states of the layer itself in place of hidden states. They are
drawn as those of a draft model (`draft_model.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eagleray.grammars.matcher import Matcher
from eagleray.kernels.kv_cache import KVCache
from eagleray.messages.steps import NewRow, Proposal
from eagleray.models.deepseek_drafts import DeepSeekDrafts
from eagleray.worker.draft_model import Proposals, Proposer
from eagleray.worker.input_batch import InputBatch, IntArray, StepInputs, make_batch
from eagleray.worker.sampler import NO_GUESS, HostSampler


@dataclass(slots=True)
class PredictedRow:
    """A row for which tokens are proposed."""

    row: int
    num_known: int
    """Number of its tokens."""
    limit: int
    """Most tokens to propose."""
    index: int
    """Index of the state from which its next token is predicted."""
    proposed: list[int] = field(default_factory=list)


class DraftLayer(Proposer):
    """`layer` with its `cache`, for the rows and the sampler of a runner."""

    def __init__(self, layer: DeepSeekDrafts, cache: KVCache, rows: InputBatch, sampler: HostSampler) -> None:
        self._layer = layer
        self._cache = cache
        self._rows = rows
        self._sampler = sampler
        self._max_len = min(layer.spec.max_model_len, rows.token_ids.shape[1] - 1)

    def add_row(self, new: NewRow) -> None:
        """Do nothing: no state is noted for rows."""

    def add_blocks(self, block_ids: Sequence[int]) -> None:
        """Do nothing: no state is noted for blocks."""

    @torch.inference_mode()
    def propose(
        self, limits: Mapping[int, int], num_known: Mapping[int, int], inputs: StepInputs, hidden: Tensor
    ) -> Proposals:
        """Compute the tokens of a step, and propose some, see `Proposer`. The time for the step's own tokens is not
        among the passes."""
        rows, first, counts = self._followed(num_known, inputs)
        if not len(rows):
            return Proposals()
        states = self._predict(rows, first, counts, hidden[self._hidden_indices(rows, counts, inputs)])
        last = first + counts
        predicted = []
        for index, (row, end) in enumerate(zip(rows.tolist(), last.tolist(), strict=True)):
            if row not in limits or num_known.get(row) != end + 1:
                continue  # it has not sampled
            if (limit := self._limit(row, end + 1, limits[row])) > 0:
                predicted.append(PredictedRow(row, end + 1, limit, index))
        passes: list[tuple[int, float]] = []
        going = predicted
        states = states[np.cumsum(counts) - 1]
        matchers = self._sampler.copy_matchers([one.row for one in predicted])
        while going:
            began_at = time.perf_counter()
            num_rows = len(going)
            states, going = self._guess(states, going, matchers)
            passes.append((num_rows, time.perf_counter() - began_at))
        return Proposals({one.row: Proposal(one.proposed, one.num_known) for one in predicted}, passes)

    def _followed(self, num_known: Mapping[int, int], inputs: StepInputs) -> tuple[IntArray, IntArray, IntArray]:
        """Return the rows of the step, the positions of their first tokens, and the numbers of their tokens with a
        known token behind them; rows with one token come first."""
        rows = inputs.rows
        known = np.array([num_known.get(row, self._rows.num_tokens[row]) for row in rows.tolist()], dtype=np.int64)
        first = inputs.batch.positions[inputs.query_end_loc - inputs.num_tokens].astype(np.int64)
        counts = np.minimum(inputs.num_tokens, known - 1 - first)
        order = np.argsort(counts > 1, kind="stable")
        order = order[counts[order] > 0]
        return rows[order], first[order], counts[order]

    def _hidden_indices(self, rows: IntArray, counts: IntArray, inputs: StepInputs) -> IntArray:
        """Return the indices in the step's batch of the first `counts` tokens of each row."""
        begins = dict(zip(inputs.rows.tolist(), (inputs.query_end_loc - inputs.num_tokens).tolist(), strict=True))
        parts = [np.arange(count) + begins[row] for row, count in zip(rows.tolist(), counts.tolist(), strict=True)]
        return np.concatenate(parts)

    def _predict(self, rows: IntArray, first: IntArray, counts: IntArray, hidden: Tensor) -> Tensor:
        """Compute `counts` tokens of each row from the positions `first` on, given their hidden states."""
        batch = make_batch(self._rows, rows, first, counts)
        following = self._rows.token_ids[np.repeat(rows, counts), batch.positions + 1].astype(np.int64)
        positions = torch.from_numpy(batch.positions)
        return self._layer.predict(hidden, torch.from_numpy(following), positions, batch, self._cache)

    def _limit(self, row: int, known: int, wanted: int) -> int:
        return min(wanted, min(self._rows.num_slots(row), self._max_len) - known + 1)

    def _guess(
        self, states: Tensor, predicted: list[PredictedRow], matchers: Mapping[int, Matcher]
    ) -> tuple[Tensor, list[PredictedRow]]:
        """Propose a token for each row, if its grammar allows one. Returns the states from which the next tokens are
        predicted, and their rows. `matchers`: see `HostSampler.guess`."""
        own = states[[one.index for one in predicted]]
        rows = np.array([one.row for one in predicted], dtype=np.int64)
        positions = np.array([one.num_known + len(one.proposed) for one in predicted], dtype=np.int64)
        going = []
        token_ids = self._sampler.guess(self._layer.token_logits(own), rows, positions, matchers).tolist()
        for index, token_id in enumerate(token_ids):
            one = predicted[index]
            if token_id == NO_GUESS:
                continue
            self._rows.token_ids[one.row, positions[index]] = token_id
            one.proposed.append(token_id)
            if len(one.proposed) < one.limit:
                going.append(index)
        if not going:
            return states, []
        states = self._predict(rows[going], positions[going] - 1, np.ones(len(going), dtype=np.int64), own[going])
        rest = [predicted[index] for index in going]
        for index, one in enumerate(rest):
            one.index = index
        return states, rest
