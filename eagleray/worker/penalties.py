"""Repetition, frequency and presence penalties, for the rows that use them.

Such a row has a slot: how often each token was generated, which tokens its prompt holds, and the list of the tokens
that are in either. Only the listed tokens' logits are touched, so a step costs as much as the texts are long, not as
the vocabulary is large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.messages.sampling import Sampling
from eagleray.worker.token_table import IntArray

__all__ = ["Penalties"]


class Penalties:
    """Counts of known tokens by slot; slots are made when first needed and used again."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slot_of = np.full(num_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output_counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        self._in_prompt = torch.empty((0, vocab_size), dtype=torch.bool, device=device)
        # [num_slots, width] tokens that a penalty may touch, some repeatedly; behind the end any token id, to no effect
        self._seen = torch.empty((0, 64), dtype=torch.int64, device=device)
        self._num_seen = np.empty(0, dtype=np.int64)
        # [num_slots, 3] repetition, frequency, presence
        self._factors = torch.empty((0, 3), dtype=torch.float32, device=device)

    def start(self, row: int, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A row is penalised, with these tokens known."""
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self._slot_of[row] = slot
        values = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._factors[slot] = torch.tensor(values, dtype=torch.float32)
        repeatable = prompt if sampling.repetition_penalty != 1 else ()
        prompt_ids = self._tensor(np.unique(np.array(repeatable, dtype=np.int64)))
        output_ids, counts = map(self._tensor, np.unique(np.array(generated, dtype=np.int64), return_counts=True))
        self._in_prompt[slot] = False
        self._in_prompt[slot, prompt_ids] = True
        self._output_counts[slot] = 0
        self._output_counts[slot, output_ids] = counts.to(torch.int32)
        seen = torch.cat([prompt_ids, output_ids])
        self._widen(len(seen))
        self._seen[slot, : len(seen)] = seen
        self._num_seen[slot] = len(seen)

    def end(self, row: int) -> None:
        slot = int(self._slot_of[row])
        if slot >= 0:
            self._slot_of[row] = -1
            self._free.append(slot)

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Each of `rows`, all penalised, generated one more token, [n]."""
        slots = self._slot_of[rows]
        self._widen(int(self._num_seen[slots].max()) + 1)
        at, tokens = self._tensor(slots), self._tensor(token_ids)
        self._output_counts[at, tokens] += 1
        self._seen[at, self._tensor(self._num_seen[slots])] = tokens
        self._num_seen[slots] += 1

    def apply(self, logits: Tensor, lines: Tensor, rows: IntArray) -> None:
        """Penalise these lines of the logits [n, vocab_size], in place; each belongs to the row beside it.

        A token that is listed twice is written twice with the same value.
        """
        slots = self._slot_of[rows]
        at = self._tensor(slots)[:, None]
        tokens = self._seen[at[:, 0], : int(self._num_seen[slots].max())]  # [num_lines, width]
        counts = self._output_counts[at, tokens]
        repetition, frequency, presence = self._factors[at[:, 0]].unsqueeze(-1).unbind(1)  # [num_lines, 1] each
        values = logits[lines[:, None], tokens]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where((counts > 0) | self._in_prompt[at, tokens], repeated, values)
        logits[lines[:, None], tokens] = values - frequency * counts - presence * (counts > 0)

    def _add_slots(self) -> None:
        """Twice as many slots. New ones are zero, so that what lies behind the end of a list is a token id."""
        have = len(self._num_seen)
        more = max(have, 1)
        self._free.extend(range(have + more - 1, have - 1, -1))
        self._output_counts = _more_rows(self._output_counts, more)
        self._in_prompt = _more_rows(self._in_prompt, more)
        self._seen = _more_rows(self._seen, more)
        self._factors = _more_rows(self._factors, more)
        self._num_seen = np.concatenate([self._num_seen, np.zeros(more, dtype=np.int64)])

    def _widen(self, width: int) -> None:
        have = self._seen.shape[1]
        if width > have:
            self._seen = torch.nn.functional.pad(self._seen, (0, max(width, 2 * have) - have))

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _more_rows(table: Tensor, more: int) -> Tensor:
    return torch.cat([table, table.new_zeros((more, table.shape[1]))])
