"""Routing equals plain torch, float64 and transformers, and each token has the same bits alone and in a batch."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from torch import Tensor

from eagleray.kernels.cpu.experts import c_router_params
from eagleray.kernels.params import RouterParams
from eagleray.kernels.torch.routing import route as route_in_torch

DTYPES = (torch.float32, torch.bfloat16)  # a dtype's number is its index


def plain(top_k: int, *, renormalize: bool, rounds: bool = False) -> RouterParams:
    return RouterParams(top_k=top_k, renormalize=renormalize, round_weights=rounds)


def route(
    library: ctypes.CDLL,
    scores: Tensor,
    params: RouterParams,
    *,
    dtype: torch.dtype = torch.float32,
    threads: int = 1,
) -> tuple[Tensor, Tensor]:
    n, num_experts = scores.shape
    ids, weights = torch.empty(n, params.top_k, dtype=torch.int32), torch.empty(n, params.top_k)
    arguments = c_router_params(params, num_experts), scores.data_ptr(), scores.stride(0), n
    library.er_route(*arguments, ids.data_ptr(), weights.data_ptr(), DTYPES.index(dtype), threads)
    return ids.long(), weights


def check_batch_invariance(
    library: ctypes.CDLL, scores: Tensor, params: RouterParams, ids: Tensor, weights: Tensor
) -> None:
    """Check that a token gets these ids and weights for all other tokens and numbers of threads."""
    for threads in (2, 3):
        ids_too, weights_too = route(library, scores, params, threads=threads)
        assert torch.equal(ids_too, ids)
        assert torch.equal(weights_too, weights)
    for row in range(len(scores)):
        assert torch.equal(route(library, scores[row : row + 1], params)[1][0], weights[row])


# ---- softmax over all experts


def exact_route(scores: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Route in float64, equal scores in order of their ids."""
    ids = scores.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.double().softmax(dim=1).gather(1, ids)
    return ids, weights / weights.sum(dim=1, keepdim=True) if renormalize else weights


def check_route(library: ctypes.CDLL, num_experts: int, top_k: int, *, renormalize: bool) -> None:
    torch.manual_seed(num_experts)
    scores = (torch.randn(50, num_experts + 3) * 3)[:, :num_experts]
    scores[10:] = scores[10:].bfloat16().float()  # many equal ones
    scores[20:30] = scores[20:30].round()
    scores[30] = 1.5
    scores[31] = torch.where(torch.arange(num_experts) % 2 == 0, -0.0, 0.0)
    scores[32, 1:] = -torch.inf
    scores[33] *= 100
    params = plain(top_k, renormalize=renormalize)
    ids, weights = route(library, scores, params)
    expected_ids, expected_weights = exact_route(scores, top_k, renormalize)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=2e-6, atol=1e-30)
    rounding = plain(top_k, renormalize=renormalize, rounds=True)
    rounded = route(library, scores, rounding, dtype=torch.bfloat16)[1]
    torch.testing.assert_close(rounded, weights.bfloat16().float(), rtol=0, atol=1e-37)
    assert torch.equal(route(library, scores, rounding)[1], weights)
    check_batch_invariance(library, scores, params, ids, weights)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (128, 8), (37, 5), (5, 5), (1, 1), (17, 16), (512, 10)])
def test_route_softmax_equals_float64(library: ctypes.CDLL, num_experts: int, top_k: int, renormalize: bool) -> None:
    check_route(library, num_experts, top_k, renormalize=renormalize)


def test_route_older_processor_equals_float64(other_library: ctypes.CDLL) -> None:
    check_route(other_library, 37, 5, renormalize=True)
    check_like_torch(other_library, ROUTERS["DeepSeek-V3"], 64)


def test_route_nan_and_infinity_stay_in_their_token(library: ctypes.CDLL) -> None:
    scores = torch.randn(6, 20)
    params = plain(4, renormalize=True)
    expected = route(library, scores, params)
    scores[1, 3] = torch.nan
    scores[2, 4] = torch.inf
    scores[3] = -torch.inf
    scores[4] = torch.nan
    ids, weights = route(library, scores, params)
    assert weights[1:5].isnan().all()
    assert torch.equal(weights[::5], expected[1][::5])
    assert torch.equal(ids[::5], expected[0][::5])
    assert ids[1, 0] == 3
    assert ids[2, 0] == 4
    assert ids[3:5].tolist() == [[0, 1, 2, 3]] * 2


# ---- other routers


def router_params(**fields: Any) -> RouterParams:
    return RouterParams(**{"top_k": 6, "renormalize": False, "round_weights": False} | fields)


def bias(num_experts: int) -> Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(1)) * 0.2


ROUTERS = {
    "DeepSeek-V2": router_params(num_groups=8, top_groups=3, scale=16.0),
    "DeepSeek-V3": router_params(
        scoring="sigmoid",
        correction_bias=bias(64),
        num_groups=8,
        top_groups=4,
        group_score="top2",
        renormalize=True,
        renormalize_eps=1e-20,
        scale=2.5,
    ),
    "one group": router_params(
        scoring="sigmoid", correction_bias=bias(64), group_score="top2", renormalize=True, renormalize_eps=1e-20
    ),
    "sigmoid": router_params(scoring="sigmoid", top_k=1),
    "softmax with a bias": router_params(correction_bias=bias(64) * 0.1, renormalize=True),
    "softmax with sums of groups": router_params(num_groups=16, top_groups=2, group_score="top2"),
    "groups of one": router_params(scoring="sigmoid", num_groups=64, top_groups=7),
    "all groups": router_params(num_groups=4, top_groups=4, top_k=64),
}


def check_like_torch(library: ctypes.CDLL, params: RouterParams, num_experts: int) -> None:
    torch.manual_seed(num_experts)
    scores = (torch.randn(60, num_experts + 3) * 2)[:, :num_experts]
    scores[40:] = scores[40:].round()  # equal ones
    ids, weights = route(library, scores, params)
    expected_ids, expected_weights = route_in_torch(scores, params)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=3e-6, atol=1e-30)
    check_batch_invariance(library, scores, params, ids, weights)


@pytest.mark.parametrize("name", ROUTERS)
def test_route_other_routers_equal_plain_torch(library: ctypes.CDLL, name: str) -> None:
    check_like_torch(library, ROUTERS[name], 64)


def test_route_weights_are_rounded_last(library: ctypes.CDLL) -> None:
    scores = torch.randn(20, 64)
    exact = route(library, scores, router_params(scale=2.7))[1]
    rounded = route(library, scores, router_params(scale=2.7, round_weights=True), dtype=torch.bfloat16)[1]
    assert torch.equal(rounded, exact.bfloat16().float())


def test_route_nan_in_groups_chooses_valid_experts(library: ctypes.CDLL) -> None:
    scores = torch.randn(8, 64)
    scores[0] = torch.nan
    scores[1, 17] = torch.nan
    scores[2] = torch.inf
    scores[3] = -torch.inf
    scores[4, 3] = torch.inf
    for each in ROUTERS.values():
        ids, weights = route(library, scores, each)
        assert ((ids >= 0) & (ids < 64)).all()
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert weights[0].isnan().all()
        assert weights[5:].isfinite().all()


def test_router_params_without_a_possible_choice_are_refused() -> None:
    refused = [
        ({"num_groups": 3, "top_groups": 3}, 64),
        ({"num_groups": 8, "top_groups": 2, "top_k": 17}, 64),
        ({"num_groups": 64, "top_groups": 6, "group_score": "top2"}, 64),
        ({"correction_bias": torch.zeros(63)}, 64),
        ({"top_k": 9}, 8),
    ]
    for fields, num_experts in refused:
        with pytest.raises(AssertionError):
            router_params(**fields).check(num_experts)


# ---- transformers


def sorted_by_id(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    order = ids.argsort(dim=1)
    return ids.gather(1, order), weights.gather(1, order)


@pytest.mark.parametrize("name", ["DeepSeek-V2", "DeepSeek-V3"])
def test_route_deepseek_routers_equal_transformers(library: ctypes.CDLL, name: str) -> None:
    from transformers import DeepseekV2Config, DeepseekV3Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    params = ROUTERS[name]
    router: Any
    fields = {"hidden_size": 64, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8}
    fields |= {"topk_group": params.top_groups, "routed_scaling_factor": params.scale}
    if name == "DeepSeek-V2":
        router = DeepseekV2TopkRouter(DeepseekV2Config(**fields, topk_method="group_limited_greedy"))
    else:
        router = DeepseekV3TopkRouter(DeepseekV3Config(**fields, norm_topk_prob=True))
        router.e_score_correction_bias.copy_(params.correction_bias)
    scores = torch.randn(40, 64) * 2
    with torch.no_grad():
        router.weight.copy_(torch.eye(64))
        _, weights, ids = router(scores)
    for found in (route(library, scores, params), route_in_torch(scores, params)):
        found_ids, found_weights = sorted_by_id(*found)
        expected_ids, expected_weights = sorted_by_id(ids, weights)
        assert torch.equal(found_ids, expected_ids)
        torch.testing.assert_close(found_weights, expected_weights, rtol=3e-6, atol=0)
