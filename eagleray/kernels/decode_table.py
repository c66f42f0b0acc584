"""The state of the running requests from which a backend takes a decode step by itself, see `Forward.decode`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagleray.kernels.forward_batch import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeTable:
    """Arrays with an element for each row of the worker, which stay where they are. A decode step reads them, and
    changes the first three."""

    token_ids: Int32Array
    """[num_rows, max_num_tokens]"""
    num_tokens: Int64Array
    """Number of known tokens."""
    num_computed: Int64Array
    """Number of the first tokens that are in the cache."""
    block_table: Int32Array
    """[num_rows, max_blocks] blocks in order of position"""
    block_size: int
    features: Int64Array
    """Flags of what the choice of a row's token takes; 0 if it is the token of the highest logit."""
    random: int
    """The flag of a random draw."""
    streams: npt.NDArray[np.uint64]
    """Initial states of random numbers."""
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float64]
    top_k: Int64Array
    """The size of the vocabulary if it does not restrict the draw."""
    top_p: npt.NDArray[np.float64]
    """1 if it does not restrict the draw."""
