"""Repetition, frequency and presence penalties, for the rows that use them.

Such a row has an entry: the list of the tokens that a penalty touches, and the number of times that each token was
generated. Only the logits of listed tokens are read and written, so the cost of a step grows with the length of the
texts, not with the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.messages.sampling import Sampling
from eagleray.worker.token_table import IntArray


class Penalties:
    """Known tokens by entry. Entries are made when first needed and reused."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._entry_of_row = np.full(num_rows, -1, dtype=np.int64)
        self._free: list[int] = []
        self._output_counts = torch.empty((0, vocab_size), dtype=torch.int32, device=device)
        # [num_entries, width] the touched tokens, some of them repeatedly; padded with the first one. They
        # are the generated tokens and, under a repetition penalty, those of the prompt.
        self._touched = torch.empty((0, 64), dtype=torch.int64, device=device)
        self._num_touched = np.empty(0, dtype=np.int64)
        # [num_entries, 3] repetition, frequency, presence
        self._factors = torch.empty((0, 3), dtype=torch.float32, device=device)

    @property
    def num_entries(self) -> int:
        """Number of entries: the most that were used at once, rounded up to a power of two. Each takes 4 bytes per
        token of the vocabulary."""
        return len(self._num_touched)

    def add_row(self, row: int, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int]) -> None:
        """Give the row an entry with these known tokens."""
        if not self._free:
            self._add_entries()
        entry = self._free.pop()
        self._entry_of_row[row] = entry
        factors = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        self._factors[entry] = torch.tensor(factors, dtype=torch.float32)
        token_ids, counts = map(self._tensor, np.unique(np.array(generated, dtype=np.int64), return_counts=True))
        self._output_counts[entry] = 0
        self._output_counts[entry, token_ids] = counts.to(torch.int32)
        known = [*prompt, *generated] if sampling.repetition_penalty != 1 else generated
        touched = self._tensor(np.unique(np.array(known, dtype=np.int64)))
        self._widen(len(touched))
        self._touched[entry] = touched[0] if len(touched) else 0  # nothing touched: no penalty has an effect yet
        self._touched[entry, : len(touched)] = touched
        self._num_touched[entry] = len(touched)

    def free_row(self, row: int) -> None:
        entry = int(self._entry_of_row[row])
        if entry >= 0:
            self._entry_of_row[row] = -1
            self._free.append(entry)

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one generated token to each of `rows`, which all have an entry, [n]."""
        entries = self._entry_of_row[rows]
        self._widen(int(self._num_touched[entries].max()) + 1)
        at, tokens = self._tensor(entries), self._tensor(token_ids)
        self._output_counts[at, tokens] += 1
        self._touched[at, self._tensor(self._num_touched[entries])] = tokens
        self._num_touched[entries] += 1

    def apply(self, logits: Tensor, indices: Tensor, rows: IntArray) -> None:
        """Penalise the logits [n, vocab_size] at `indices`, in place; each belongs to the row at the same position of
        `rows`.

        A token that is listed repeatedly is written repeatedly, with the same value.
        """
        entries = self._entry_of_row[rows]
        at = self._tensor(entries)
        tokens = self._touched[at, : int(self._num_touched[entries].max())]  # [num_rows, width]
        counts = self._output_counts[at[:, None], tokens]
        repetition, frequency, presence = self._factors[at].unsqueeze(-1).unbind(1)  # [num_rows, 1] each
        values = logits[indices[:, None], tokens]
        values = torch.where(values > 0, values / repetition, values * repetition)
        logits[indices[:, None], tokens] = values - frequency * counts - presence * (counts > 0)

    def _add_entries(self) -> None:
        """Double the number of entries."""
        have = self.num_entries
        more = max(have, 1)
        self._free.extend(range(have + more - 1, have - 1, -1))
        self._output_counts = _append_entries(self._output_counts, more)
        self._touched = _append_entries(self._touched, more)
        self._factors = _append_entries(self._factors, more)
        self._num_touched = np.concatenate([self._num_touched, np.zeros(more, dtype=np.int64)])

    def _widen(self, width: int) -> None:
        have = self._touched.shape[1]
        if width > have:
            again = self._touched[:, :1].expand(-1, max(width, 2 * have) - have)
            self._touched = torch.cat([self._touched, again], dim=1)

    def _tensor(self, array: IntArray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _append_entries(table: Tensor, more: int) -> Tensor:
    return torch.cat([table, table.new_zeros((more, table.shape[1]))])
