"""The input of one forward pass: the tokens of some rows, and the slots of the KV cache that they use.

Made by the worker for every step, read by the model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.uploads import upload

Int32Array = npt.NDArray[np.int32]


@dataclass(slots=True)
class DeviceNumbers:
    """Numbers that the worker needs on the device after a pass. A backend that uploads a batch by one copy uploads them
    by the same copy and sets `tensor`."""

    array: Int32Array
    tensor: Tensor | None = None

    def on(self, device: torch.device) -> Tensor:
        """Return the numbers on `device`, int32. They are valid until the next batch is uploaded."""
        if self.tensor is None:
            self.tensor = torch.from_numpy(self.array) if device.type == "cpu" else upload(self.array, device)
        return self.tensor


@dataclass(frozen=True, slots=True)
class AdapterGroups:
    """The tokens of a batch that have adapters, grouped by the slot of the adapter."""

    slots: Int32Array
    """[num_groups] in ascending order"""
    offsets: Int32Array
    """[num_groups + 1] index into `tokens` of each group's first token, and the number of all"""
    tokens: Int32Array
    """Indices of the tokens in the batch."""

    @staticmethod
    def of(slots: Int32Array) -> AdapterGroups | None:
        """Group the tokens of a batch by `slots` [num_tokens], -1 for a token without an adapter. Returns None if no
        token has one."""
        order = np.argsort(slots, kind="stable").astype(np.int32)
        tokens = order[np.count_nonzero(slots < 0) :]
        if len(tokens) == 0:
            return None
        of_groups, firsts = np.unique(slots[tokens], return_index=True)
        return AdapterGroups(of_groups.astype(np.int32), np.append(firsts, len(tokens)).astype(np.int32), tokens)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Contiguous host arrays over the rows of a batch. Rows that compute one token come first."""

    token_ids: Int32Array
    """[num_tokens] ids; -1 - row for a token that only the device knows: the last one sampled for that row"""
    positions: Int32Array
    """[num_tokens] consecutive within a row"""
    slot_mapping: Int32Array
    """[num_tokens] slot (block x block_size + offset) that each token's key and value are written to; no slot twice"""
    block_table: Int32Array
    """[num_rows, max_blocks] blocks of each row in order of position, padded with 0"""
    seq_lens: Int32Array
    """[num_rows] cached tokens of each row, this step's included"""
    query_start_loc: Int32Array
    """[num_rows + 1] index of each row's first token, and behind the last token of all"""
    num_decodes: int
    """Number of rows that compute exactly one token; they are the first ones."""
    numbers: DeviceNumbers = field(default_factory=lambda: DeviceNumbers(np.empty(0, np.int32)))
    last_tokens: Tensor | None = None
    """[most rows] the last token sampled for each row, on the device, if `token_ids` may refer to it"""
    adapters: AdapterGroups | None = None
    """The tokens that have adapters, if there are any."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PassLimits:
    """The largest batch that a program has memory for."""

    num_tokens: int
    num_rows: int
    num_positions: int
    """Cached tokens of a row, this step's included."""

    def covers(self, other: PassLimits) -> bool:
        return (
            self.num_tokens >= other.num_tokens
            and self.num_rows >= other.num_rows
            and self.num_positions >= other.num_positions
        )

    def grown_to(self, other: PassLimits) -> PassLimits:
        """Return limits that cover both, with room for more."""
        return PassLimits(
            max(self.num_tokens, power_of_two(other.num_tokens)),
            max(self.num_rows, power_of_two(other.num_rows)),
            max(self.num_positions, power_of_two(other.num_positions)),
        )


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()
