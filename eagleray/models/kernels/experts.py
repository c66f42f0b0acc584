"""Products of tokens with their experts, in plain torch: the tokens of an expert together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["compute_experts"]

Products = Sequence[Callable[[Tensor], Tensor]]


def compute_experts(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Products, down: Products) -> Tensor:
    """The weighted sum of what each token's experts compute: x [num_tokens, hidden_size], ids and weights
    [num_tokens, top_k] -> [num_tokens, hidden_size]. It does not depend on which other tokens are in the batch."""
    num_tokens, top_k = expert_ids.shape
    pairs = expert_ids.reshape(-1)  # a pair is a token and one of its experts
    order = pairs.argsort(stable=True)
    counts = torch.bincount(pairs, minlength=len(gate_up)).tolist()
    active = [expert for expert, count in enumerate(counts) if count]
    rows = x.index_select(0, order // top_k).split([counts[expert] for expert in active])
    sorted_outputs = torch.cat([down[expert](gate_up[expert](row)) for expert, row in zip(active, rows, strict=True)])
    outputs = torch.empty_like(sorted_outputs).index_copy_(0, order, sorted_outputs)
    # [num_tokens, 1, top_k] x [num_tokens, top_k, hidden_size]; with float32 weights the sum is in float32
    outputs = outputs.view(num_tokens, top_k, -1).to(expert_weights.dtype)
    return torch.bmm(expert_weights[:, None], outputs)[:, 0].to(x.dtype)
