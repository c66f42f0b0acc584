"""What one forward pass computes: the tokens of some rows, and where their keys and values are cached.

Made by the worker for every step, read by the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Batch"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows one after another, those that compute one token first. A slot is block x block_size + offset."""

    token_ids: Tensor
    """int64 [num_tokens]"""
    positions: Tensor
    """int64 [num_tokens]; those of a row follow each other and end with its last cached token"""
    slots: Tensor
    """int64 [num_tokens]: where each token's key and value go; no slot twice"""
    block_table: Tensor
    """int64 [num_rows, max_blocks]: blocks of each row in order of position, padded with 0"""
    context_lens: list[int]
    """[num_rows] tokens of the row in the cache, this step's included"""
    query_lens: list[int]
    """[num_rows] tokens of the row computed in this step"""
    num_decodes: int
    """The first this many rows compute exactly one token."""
