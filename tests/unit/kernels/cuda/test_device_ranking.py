from __future__ import annotations

import pytest
import torch

from eagleray.kernels.cuda.ranking import DeviceRanking
from eagleray.kernels.ranking import Ranking


@pytest.mark.parametrize("k", [0, 1, 5, 40, 50])
def test_device_ranking_top_equals_plain_ranking(k: int) -> None:
    torch.manual_seed(k)
    logits = torch.randn(6, 40)
    logits[1] = (logits[1] * 2).round()  # ties, also of 0.0 and -0.0
    logits[2] = 1.5
    logits[3, ::3] = -torch.inf
    logits[3, 5] = torch.inf
    logits[4, 7], logits[4, 30] = torch.nan, -torch.nan
    top = DeviceRanking().top(logits, k)
    assert top.dtype == torch.int64
    assert top.tolist() == Ranking().top(logits, k).tolist()
