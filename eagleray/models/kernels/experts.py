"""Products of tokens with their experts, in plain torch: the tokens of an expert together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["compute_experts"]

Products = Sequence[Callable[[Tensor], Tensor]]


def compute_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Products,
    down: Products,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """As `Kernels.experts`. The sum of a token does not depend on which other tokens are in the batch."""
    num_tokens, top_k = expert_ids.shape
    if num_tokens == 1:
        outputs = _one_token(x, expert_ids[0].tolist(), gate_up, down, activation)
    else:
        outputs = _many_tokens(x, expert_ids, gate_up, down, activation)
    # [num_tokens, 1, top_k] x [num_tokens, top_k, hidden_size]; with float32 weights the sum is in float32
    outputs = outputs.view(num_tokens, top_k, -1).to(expert_weights.dtype)
    return torch.bmm(expert_weights[:, None], outputs)[:, 0].to(x.dtype)


def _one_token(
    x: Tensor, experts: list[int], gate_up: Products, down: Products, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """[top_k, hidden_size]"""
    inner = activation(torch.cat([gate_up[expert](x) for expert in experts]))  # [top_k, intermediate_size]
    return torch.cat([down[expert](row) for expert, row in zip(experts, inner.split(1), strict=True)])


def _many_tokens(
    x: Tensor, expert_ids: Tensor, gate_up: Products, down: Products, activation: Callable[[Tensor], Tensor]
) -> Tensor:
    """[num_tokens * top_k, hidden_size], the rows of a token together, in the order of its experts"""
    pairs = expert_ids.reshape(-1)  # a pair is a token and one of its experts
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=len(gate_up)).tolist()
    active = [expert for expert, count in enumerate(counts) if count]
    sizes = [counts[expert] for expert in active]

    rows = x.index_select(0, order // expert_ids.shape[1]).split(sizes)
    inner = activation(torch.cat([gate_up[expert](row) for expert, row in zip(active, rows, strict=True)]))
    outer = torch.cat([down[expert](row) for expert, row in zip(active, inner.split(sizes), strict=True)])
    return torch.empty_like(outer).index_copy_(0, order, outer)
