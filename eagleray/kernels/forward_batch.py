"""What one forward pass computes: the tokens of some rows, and where their keys and values are cached.

Made by the worker for every step, read by the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows one after another, those that compute one token first. A slot is block x block_size + offset.

    Contiguous arrays of the host.
    """

    token_ids: Int32Array
    """[num_tokens]"""
    positions: Int32Array
    """[num_tokens]; those of a row follow each other and end with its last cached token"""
    slots: Int32Array
    """[num_tokens]: where each token's key and value go; no slot twice"""
    block_table: Int32Array
    """[num_rows, max_blocks]: blocks of each row in order of position, padded with 0"""
    context_lens: Int32Array
    """[num_rows] tokens of the row in the cache, this step's included"""
    starts: Int32Array
    """[num_rows + 1] where the row's tokens begin, and behind the last one"""
    num_decodes: int
    """The first this many rows compute exactly one token."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)
