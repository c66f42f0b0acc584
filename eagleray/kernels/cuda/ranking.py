"""The ranking of tokens on a CUDA device, where the host must not wait for a result."""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.ranking import Ranking

_NAN_ORDER = 0x7FC00000
"""Key of NaN, which is above that of infinity."""


class DeviceRanking(Ranking):
    """The ranking without a read of the device: shapes depend on shapes and on `k` alone."""

    def top(self, logits: Tensor, k: int) -> Tensor:
        """As `Ranking.top`. `topk` breaks ties arbitrarily, so each key is unlike all others: the order of the logit,
        then that of the token id."""
        size = logits.shape[1]
        k = min(k, size)
        if k == 0:
            return torch.empty((len(logits), 0), dtype=torch.int64, device=logits.device)
        bits = (logits + 0.0).view(torch.int32)  # + 0.0, because -0.0 equals 0.0
        order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # descending among negative numbers
        order = order.masked_fill(logits != logits, _NAN_ORDER)
        ids_from_end = torch.arange(size - 1, -1, -1, device=logits.device)
        keys = (order.to(torch.int64) << 32) | ids_from_end
        return size - 1 - (keys.topk(k, dim=-1).values & 0xFFFFFFFF)
