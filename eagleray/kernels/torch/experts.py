"""Products of tokens with their experts, in plain torch. The tokens of an expert are computed together.

A pair is a token and one of its experts. Experts are named by the slots that hold their weights: a rank has a sequence
of products, one for each slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagleray.kernels.backend import ExpertProducts, OperationWithWeights

Products = Sequence[OperationWithWeights]


class TorchProducts(ExpertProducts):
    def __init__(self, gate_up: Products, down: Products) -> None:
        assert len(gate_up) == len(down)
        self.num_slots = len(down)
        self._gate_up = gate_up
        self._down = down

    def pairs(self, x: Tensor, slots: Tensor) -> Tensor:
        return _multiply_pairs(x, slots, self._gate_up, self._down).float()

    def sums(self, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        return self.weighted_sum(self.pairs(x, slots), weights)

    def weighted_sum(self, outputs: Tensor, weights: Tensor) -> Tensor:
        n, k, size = outputs.shape
        total = outputs.new_zeros(n, size)
        for place in range(k):  # not one operation over k, in which the order could depend on the number of rows
            total += outputs[:, place] * weights[:, place, None]
        return total

    def storage(self, slot: int) -> list[Tensor]:
        return [*self._gate_up[slot].storage(), *self._down[slot].storage()]


def compute_experts(x: Tensor, slots: Tensor, weights: Tensor, gate_up: Products, down: Products) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts: x [num_tokens, hidden_size], slots (-1 is left
    out) and weights [num_tokens, top_k] -> [num_tokens, hidden_size]. A token's result does not depend on which other
    tokens are in the batch."""
    # [num_tokens, 1, top_k] x [num_tokens, top_k, hidden_size]; with float32 weights the sum is in float32
    outputs = _multiply_pairs(x, slots, gate_up, down).to(weights.dtype)
    return torch.bmm(weights[:, None], outputs)[:, 0].to(x.dtype)


def _multiply_pairs(x: Tensor, slots: Tensor, gate_up: Products, down: Products) -> Tensor:
    """Return [num_tokens, top_k, hidden_size] of x's dtype, zeros where the slot is -1."""
    num_tokens, top_k = slots.shape
    pairs = slots.reshape(-1)
    order = pairs.argsort(stable=True)
    absent, *counts = torch.bincount(pairs + 1, minlength=len(down) + 1).tolist()
    active = [slot for slot, count in enumerate(counts) if count]
    make = x.new_zeros if absent or not active else x.new_empty
    outputs = make(num_tokens * top_k, x.shape[1])
    if active:
        order = order[absent:]
        rows = x.index_select(0, order // top_k).split([counts[slot] for slot in active])
        results = [down[slot](gate_up[slot](row)) for slot, row in zip(active, rows, strict=True)]
        outputs.index_copy_(0, order, torch.cat(results))
    return outputs.view(num_tokens, top_k, x.shape[1])
