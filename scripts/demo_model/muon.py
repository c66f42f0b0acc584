"""Muon, the optimizer of the embedded model's matrices."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose matrices are made near-orthogonal (Jordan et al. 2024), with AdamW's step size (Liu et al. 2025).

    It takes stacks of matrices, [..., rows, columns], as the experts' weights are.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.1):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        for group in self.param_groups:
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalize(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:])))


def orthogonalize(matrices: Tensor) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices by five Newton-Schulz steps.  # [..., rows, columns]"""
    x: Tensor = matrices.reshape(-1, *matrices.shape[-2:]).bfloat16()
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if is_tall else x).to(matrices.dtype).reshape(matrices.shape)
