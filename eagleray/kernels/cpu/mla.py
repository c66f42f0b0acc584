"""Multi-head latent attention with packed matrices: parameters for ops of a pass."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.params import MLAParams
from eagleray.kernels.storage import memory_of

MLA_TOKENS = 256
"""Tokens whose queries are absorbed together: with 128 heads of DeepSeek-V3 they take 32 MiB."""


class NativeMLA:
    """The latent attention of a layer, see `MLAWeights`.

    `keys` and `values` are the matrices of `params`, packed one after the other as `CMLAParams` says.
    """

    def __init__(self, params: MLAParams, *, keys: Tensor, values: Tensor) -> None:
        self.num_heads = params.num_heads
        self.value_dim = params.value_dim
        self._rank = len(params.norm)
        self._plain_dim, self._rotated_dim = params.plain_dim, params.rotated_dim
        self._scale, self._norm_eps = params.scale, params.norm_eps
        self._norm = params.norm.float().contiguous()
        self._keys, self._values = keys, values

    def storage(self) -> list[Tensor]:
        return memory_of(self._norm, self._keys, self._values)

    def c_params(self, block_size: int) -> CStruct:
        """Convert to C. The struct points into this object."""
        return abi.CMLAParams(
            num_heads=self.num_heads,
            rank=self._rank,
            plain_dim=self._plain_dim,
            rotated_dim=self._rotated_dim,
            value_dim=self.value_dim,
            block_size=block_size,
            scale=self._scale,
            norm=self._norm.data_ptr(),
            eps=self._norm_eps,
            keys=self._keys.data_ptr(),
            values=self._values.data_ptr(),
        )


def num_weights(params: CStruct) -> int:
    """Return the numbers in the matrices of all heads."""
    number: int = params.num_heads * params.rank * (params.plain_dim + params.value_dim)
    return number


def latents_bytes(params: CStruct, num_tokens: int, dtype: torch.dtype) -> int:
    """Return the bytes of `CMLAScratch.latents` for this number of tokens at a time."""
    size: int = num_tokens * params.num_heads * params.rank * dtype.itemsize
    return size
