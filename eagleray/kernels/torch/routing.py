"""Which experts compute a token, and with what weights: the rule in plain torch, which defines the native one.

Formulas as in transformers' modeling_mixtral, modeling_qwen3_moe, modeling_deepseek_v2 and modeling_deepseek_v3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RouterParams:
    """How the experts of a layer are chosen and mixed."""

    top_k: int
    renormalize: bool
    """Divide the weights of a token's experts by their sum."""
    round_weights: bool
    """To the model's dtype, before the outputs are summed up."""
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """What makes probabilities of the router's scores."""
    correction_bias: Tensor | None = None
    """float32 [num_experts], added to the probabilities for the choice of experts alone, not for their weights."""
    num_groups: int = 1
    """Consecutive experts are a group; only those of the best `top_groups` groups are candidates."""
    top_groups: int = 1
    group_score: Literal["max", "top2"] = "max"
    """What makes a group good: its best expert, or the sum of its two best."""
    scale: float = 1.0
    """The weights are multiplied by it in the end."""
    renormalize_eps: float = 0.0
    """Added to the sum that weights are divided by."""

    def check(self, num_experts: int) -> None:
        """That a choice is possible; what a user could get wrong is checked where config.json is read."""
        size = num_experts // self.num_groups
        assert size * self.num_groups == num_experts, "the groups divide the experts"
        assert 1 <= self.top_groups <= self.num_groups
        assert 1 <= self.top_k <= size * self.top_groups, "the best groups have enough experts"
        assert self.num_groups == 1 or self.group_score == "max" or size >= 2
        bias = self.correction_bias
        assert bias is None or (bias.dtype == torch.float32 and bias.shape == (num_experts,) and bias.is_contiguous())


def route(scores: Tensor, mixture: RouterParams) -> tuple[Tensor, Tensor]:
    """As `Kernels.route`."""
    if mixture.scoring == "sigmoid":
        probabilities = torch.sigmoid(scores.float())
    else:
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if mixture.correction_bias is None and mixture.num_groups == 1 and mixture.scoring == "softmax":
        weights, ids = torch.topk(probabilities, mixture.top_k, dim=-1)
    else:
        ids = _first(_choices(probabilities, mixture), mixture.top_k)
        weights = probabilities.gather(1, ids)
    if mixture.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + mixture.renormalize_eps)
    if mixture.scale != 1.0:
        weights = weights * mixture.scale
    return ids, weights.to(scores.dtype) if mixture.round_weights else weights


def _choices(probabilities: Tensor, mixture: RouterParams) -> Tensor:
    """[num_tokens, num_experts] by what a token's experts are chosen; minus infinity for those that are none of its
    candidates."""
    choices = probabilities
    if mixture.correction_bias is not None:
        choices = choices + mixture.correction_bias
    if mixture.num_groups == 1:
        return choices
    grouped = choices.unflatten(1, (mixture.num_groups, -1))  # [num_tokens, num_groups, experts of a group]
    looks = 1 if mixture.group_score == "max" else 2
    group_scores = grouped.topk(looks, dim=-1).values.sum(dim=-1)
    is_best = torch.zeros_like(group_scores, dtype=torch.bool)
    is_best.scatter_(1, _first(group_scores, mixture.top_groups), True)
    return grouped.masked_fill(~is_best[:, :, None], -torch.inf).flatten(1)


def _first(values: Tensor, k: int) -> Tensor:
    """[n, k] where the highest of each row are, in order; the first among equals, which `topk` does not promise."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]
