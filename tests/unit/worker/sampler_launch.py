"""The two halves of a choice of tokens in one call."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.forward_batch import DeviceNumbers
from eagleray.worker.sampler import SamplingStep, TokenSampler


def launch(sampler: TokenSampler[Any], logits: Tensor, rows: np.ndarray, positions: np.ndarray) -> SamplingStep:
    """Prepare the choice, bring its words to the device of the logits, and launch it."""
    plan = sampler.prepare(rows, positions)
    return sampler.launch(logits, plan, DeviceNumbers(plan.words).on(torch.device(logits.device)))
