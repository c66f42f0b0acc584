"""Repetition, frequency and presence penalties, for the rows that use them.

Such a row has a slot: the list of the tokens that a penalty touches, and how often each token was generated. Only the
listed tokens' logits are read and written, so a step costs as much as the texts are long, not as the vocabulary is
large.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.messages.sampling import Sampling
from eagleray.worker.token_table import IntArray


class Penalties:
    """Known tokens by slot; slots are made when first needed and used again."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._slot_of = np.full(num_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output_counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        # [num_slots, width] the tokens touched, some of them repeatedly; behind the end the first one again. They are
        # the generated ones and, under a repetition penalty, the prompt's.
        self._touched = torch.empty((0, 64), dtype=torch.int64, device=device)
        self._num_touched = np.empty(0, dtype=np.int64)
        # [num_slots, 3] repetition, frequency, presence
        self._factors = torch.empty((0, 3), dtype=torch.float32, device=device)

    @property
    def num_slots(self) -> int:
        """As many as were used at once, up to the next power of two; each takes 4 bytes per token of the vocabulary."""
        return len(self._num_touched)

    def start(self, row: int, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """A row is penalised, with these tokens known."""
        if not self._free:
            self._add_slots()
        slot = self._free.pop()
        self._slot_of[row] = slot
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._factors[slot] = torch.tensor(factors, dtype=torch.float32)
        token_ids, counts = map(self._tensor, np.unique(np.array(generated, dtype=np.int64), return_counts=True))
        self._output_counts[slot] = 0
        self._output_counts[slot, token_ids] = counts.to(torch.int32)
        known = [*prompt, *generated] if sampling.repetition_penalty != 1 else generated
        touched = self._tensor(np.unique(np.array(known, dtype=np.int64)))
        self._widen(len(touched))
        self._touched[slot] = touched[0] if len(touched) else 0  # nothing touched: no penalty has an effect yet
        self._touched[slot, : len(touched)] = touched
        self._num_touched[slot] = len(touched)

    def end(self, row: int) -> None:
        slot = int(self._slot_of[row])
        if slot >= 0:
            self._slot_of[row] = -1
            self._free.append(slot)

    def append(self, rows: IntArray, token_ids: IntArray) -> None:
        """Each of `rows`, all penalised, generated one more token, [n]."""
        slots = self._slot_of[rows]
        self._widen(int(self._num_touched[slots].max()) + 1)
        at, tokens = self._tensor(slots), self._tensor(token_ids)
        self._output_counts[at, tokens] += 1
        self._touched[at, self._tensor(self._num_touched[slots])] = tokens
        self._num_touched[slots] += 1

    def apply(self, logits: Tensor, lines: Tensor, rows: IntArray) -> None:
        """Penalise these lines of the logits [n, vocab_size], in place; each belongs to the row beside it.

        A token that is listed repeatedly is written repeatedly, with the same value.
        """
        slots = self._slot_of[rows]
        at = self._tensor(slots)
        tokens = self._touched[at, : int(self._num_touched[slots].max())]  # [num_lines, width]
        counts = self._output_counts[at[:, None], tokens]
        repetition, frequency, presence = self._factors[at].unsqueeze(-1).unbind(1)  # [num_lines, 1] each
        values = logits[lines[:, None], tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[lines[:, None], tokens] = values - frequency * counts - presence * (counts > 0)

    def _add_slots(self) -> None:
        """Twice as many slots."""
        have = self.num_slots
        more = max(have, 1)
        self._free.extend(range(have + more - 1, have - 1, -1))
        self._output_counts = _more_slots(self._output_counts, more)
        self._touched = _more_slots(self._touched, more)
        self._factors = _more_slots(self._factors, more)
        self._num_touched = np.concatenate([self._num_touched, np.zeros(more, dtype=np.int64)])

    def _widen(self, width: int) -> None:
        have = self._touched.shape[1]
        if width > have:
            again = self._touched[:, :1].expand(-1, max(width, 2 * have) - have)
            self._touched = torch.cat([self._touched, again], dim=1)

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _more_slots(table: Tensor, more: int) -> Tensor:
    return torch.cat([table, table.new_zeros((more, table.shape[1]))])
