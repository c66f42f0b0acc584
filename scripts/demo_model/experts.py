"""Forward pass of the experts for training, registered with transformers under the name `EXPERTS_IMPLEMENTATION`.

It computes what transformers' own does. The difference is in the backward pass: the tokens of an expert are gathered by
a permutation, whose gradient is another gather, where plain indexing adds up row by row, on one thread.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

EXPERTS_IMPLEMENTATION = "permuted"


class GatherTokens(torch.autograd.Function):
    """Rows of tokens in the order of their experts: row i is that of token `order[i] // top_k`."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return tokens[order // top_k]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse].view(-1, ctx.top_k, grads[0].shape[1]).sum(1), None, None, None


class Permute(torch.autograd.Function):
    """Rows in another order."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0][inverse], None, None


def permuted_experts_forward(experts: Any, tokens: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum of each token's experts.  # [num_tokens, hidden_size]"""
    top_k = top_k_index.shape[1]
    expert_of_row, order = top_k_index.flatten().sort()
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    ends = torch.bincount(expert_of_row, minlength=experts.num_experts).cumsum(0).to(torch.int32)
    rows: Tensor = GatherTokens.apply(tokens.bfloat16(), order, inverse, top_k)  # type: ignore[no-untyped-call]
    gate, up = F.grouped_mm(rows, experts.gate_up_proj.bfloat16().mT, offs=ends).chunk(2, dim=-1)
    rows = F.grouped_mm(F.silu(gate) * up, experts.down_proj.bfloat16().mT, offs=ends)
    rows = Permute.apply(rows, inverse, order)  # type: ignore[no-untyped-call]
    per_token = rows.view(-1, top_k, rows.shape[1])
    return torch.bmm(top_k_weights.bfloat16().unsqueeze(1), per_token).squeeze(1).to(tokens.dtype)


def use_permuted_experts(model: nn.Module) -> None:
    """Let a model's experts be computed by `permuted_experts_forward`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, permuted_experts_forward)
    model.config._experts_implementation = EXPERTS_IMPLEMENTATION  # type: ignore[union-attr]
