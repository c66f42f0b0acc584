"""The choice of a token's experts and their weights, in plain torch. It defines the native one.

Formulas as in transformers' modeling_mixtral, modeling_qwen3_moe, modeling_deepseek_v2 and modeling_deepseek_v3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.params import RouterParams


def route(scores: Tensor, router: RouterParams) -> tuple[Tensor, Tensor]:
    """See `KernelBackend.route`."""
    if router.scoring == "sigmoid":
        probabilities = torch.sigmoid(scores.float())
    else:
        probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
    if router.correction_bias is None and router.num_groups == 1 and router.scoring == "softmax":
        weights, ids = torch.topk(probabilities, router.top_k, dim=-1)
    else:
        ids = _first(_choices(probabilities, router), router.top_k)
        weights = probabilities.gather(1, ids)
    if router.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + router.renormalize_eps)
    if router.scale != 1.0:
        weights = weights * router.scale
    return ids, weights.to(scores.dtype) if router.round_weights else weights


def _choices(probabilities: Tensor, router: RouterParams) -> Tensor:
    """Return the values [num_tokens, num_experts] by which a token's experts are chosen: minus infinity for experts
    that are not candidates."""
    choices = probabilities
    if router.correction_bias is not None:
        choices = choices + router.correction_bias
    if router.num_groups == 1:
        return choices
    grouped = choices.unflatten(1, (router.num_groups, -1))  # [num_tokens, num_groups, experts of a group]
    num_counted = 1 if router.group_score == "max" else 2
    group_scores = grouped.topk(num_counted, dim=-1).values.sum(dim=-1)
    is_best = torch.zeros_like(group_scores, dtype=torch.bool)
    is_best.scatter_(1, _first(group_scores, router.top_groups), True)
    return grouped.masked_fill(~is_best[:, :, None], -torch.inf).flatten(1)


def _first(values: Tensor, k: int) -> Tensor:
    """Return the indices [n, k] of the highest values of each row, in order; of equal ones the first, which `topk` does
    not guarantee."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k]
