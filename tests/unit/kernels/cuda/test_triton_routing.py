"""Routing equals plain torch for the routers of all families, and pairs are sorted by slot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton_compile import HOPPER_FIRST, compile_kernel

from eagleray.kernels.cuda.triton import routing
from eagleray.kernels.cuda.triton.routing import DeviceSlotMap, PairTiles, align, align_workspace, max_tiles
from eagleray.kernels.expert_slots import LayerExpertSlots
from eagleray.kernels.params import RouterParams
from eagleray.kernels.torch.routing import route as route_in_torch

CPU = torch.device("cpu")

NAN_IS_EXPECTED = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def router_params(**fields: Any) -> RouterParams:
    return RouterParams(**{"top_k": 4, "renormalize": False, "round_weights": False} | fields)


def bias(num_experts: int) -> Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(1)) * 0.2


V3 = {"scoring": "sigmoid", "renormalize": True, "renormalize_eps": 1e-20, "scale": 2.5, "group_score": "top2"}
ROUTERS = {
    "softmax": (router_params(), 8),
    "renormalized softmax": (router_params(top_k=8, renormalize=True), 128),
    "no power of two": (router_params(top_k=5, renormalize=True), 37),
    "one expert": (router_params(top_k=1), 1),
    "all experts": (router_params(top_k=5, renormalize=True), 5),
    "many experts": (router_params(top_k=16), 512),
    "DeepSeek-V2": (router_params(top_k=6, num_groups=8, top_groups=3, scale=16.0), 160),
    "DeepSeek-V3": (
        router_params(top_k=8, correction_bias=bias(256), num_groups=8, top_groups=4, **V3),
        256,
    ),
    "one group": (router_params(top_k=6, correction_bias=bias(64), **V3), 64),
    "sigmoid": (router_params(scoring="sigmoid", top_k=1), 64),
    "softmax with a bias": (router_params(correction_bias=bias(64) * 0.1, renormalize=True), 64),
    "softmax with sums of groups": (router_params(num_groups=12, top_groups=2, group_score="top2"), 60),
    "groups of one": (router_params(scoring="sigmoid", num_groups=30, top_groups=7, top_k=6), 30),
    "all groups": (router_params(num_groups=4, top_groups=4, top_k=16), 16),
}


def route(scores: Tensor, router: RouterParams, num_tokens: int | None = None, **arguments: Any) -> tuple[Any, ...]:
    shape = len(scores), router.top_k
    ids, weights = torch.full(shape, 12345, dtype=torch.int32), torch.full(shape, torch.nan)
    count = torch.tensor([len(scores) if num_tokens is None else num_tokens], dtype=torch.int32)
    arguments = {"dtype": scores.dtype} | arguments
    routing.route(scores, router, num_tokens=count, ids=ids, weights=weights, **arguments)
    return ids.long(), weights


def strided(scores: Tensor) -> Tensor:
    """Return the same numbers with NaN between the rows."""
    rows, size = scores.shape
    memory = torch.full((rows, size + 3), torch.nan, dtype=scores.dtype)
    memory[:, :size] = scores
    return memory[:, :size]


@pytest.mark.parametrize("name", ROUTERS)
def test_route_equals_torch(name: str) -> None:
    router, num_experts = ROUTERS[name]
    torch.manual_seed(num_experts)
    scores = torch.randn(12, num_experts) * 2
    scores[8:] = scores[8:].round()  # equal ones
    scores[11] = torch.where(torch.arange(num_experts) % 2 == 0, -0.0, 0.0)
    ids, weights = route(strided(scores), router)
    expected_ids, expected_weights = route_in_torch(scores, router)
    # of equal probabilities plain torch may choose any, if it does not sort; scores decide here
    is_plain = router.scoring == "softmax" and router.num_groups == 1 and router.correction_bias is None
    expected_ids = (
        scores.sort(dim=1, descending=True, stable=True).indices[:, : router.top_k] if is_plain else expected_ids
    )
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights, expected_weights, rtol=4e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_route_scores_of_the_models_dtype_equal_torch(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    router = router_params(renormalize=True, scale=2.7)
    scores = torch.randn(6, 24).to(dtype)
    assert torch.equal(route(scores, router)[0], route_in_torch(scores, router)[0])
    torch.testing.assert_close(route(scores, router)[1], route_in_torch(scores, router)[1], rtol=4e-6, atol=0)


def test_route_weights_are_rounded_last() -> None:
    torch.manual_seed(0)
    scores = torch.randn(6, 24)
    exact = route(scores, router_params(scale=2.7))[1]
    rounded = route(scores, router_params(scale=2.7, round_weights=True), dtype=torch.float16)[1]
    assert torch.equal(rounded, exact.half().float())
    assert torch.equal(route(scores, router_params(scale=2.7, round_weights=True))[1], exact)


@NAN_IS_EXPECTED
def test_route_nan_and_infinity_stay_in_their_token() -> None:
    torch.manual_seed(0)
    scores, router = torch.randn(6, 20), router_params(renormalize=True)
    expected = route(scores, router)
    scores[1, 3], scores[2, 4], scores[3], scores[4] = torch.nan, torch.inf, -torch.inf, -torch.nan
    ids, weights = route(scores, router)
    assert weights[1:5].isnan().all()
    assert torch.equal(weights[::5], expected[1][::5])
    assert torch.equal(ids[::5], expected[0][::5])
    assert ids[1, 0] == 3
    assert ids[2, 0] == 4
    assert ids[3:5].tolist() == [[0, 1, 2, 3]] * 2


@NAN_IS_EXPECTED
def test_route_nan_in_groups_chooses_valid_experts() -> None:
    for router, num_experts in ROUTERS.values():
        scores = torch.randn(5, num_experts)
        scores[0], scores[1, 0], scores[2], scores[3] = torch.nan, torch.nan, torch.inf, -torch.inf
        ids, weights = route(scores, router)
        assert ((ids >= 0) & (ids < num_experts)).all()
        assert all(len(set(row)) == len(row) for row in ids.tolist())
        assert weights[0].isnan().all()
        assert weights[4:].isfinite().all()


@pytest.mark.parametrize("num_experts", [64, 300])
def test_route_padded_rows_are_neither_counted_nor_traced(num_experts: int) -> None:
    torch.manual_seed(0)
    router = router_params()
    scores = torch.randn(5, num_experts)
    scores[3:] = torch.nan
    counts = torch.full((2, num_experts), 1 << 40)
    kind = torch.uint8 if num_experts <= 256 else torch.uint16
    trace = torch.full((6, 3, router.top_k), 77, dtype=torch.int32).to(kind)
    ids, weights = route(scores, router, 3, counts=counts[1], traced_ids=trace[:, 1])
    assert torch.equal(ids[:3], route_in_torch(scores[:3], router)[0])
    assert (ids[3:] == -1).all()
    assert (weights[3:] == 0).all()
    assert torch.equal(counts[1] - (1 << 40), ids[:3].flatten().bincount(minlength=num_experts))
    assert (counts[0] == 1 << 40).all()
    trace = trace.int()
    assert torch.equal(trace[:3, 1].long(), ids[:3])
    assert (trace[3:] == 77).all()
    assert (trace[:, ::2] == 77).all()


@pytest.mark.parametrize("rank", [None, 1])
def test_route_copies_take_turns_over_the_rows(rank: int | None) -> None:
    torch.manual_seed(0)
    experts = np.array([0, 1, 2, 3, 0, 2, 0, 1])
    layer = LayerExpertSlots(experts, num_experts=4, rank=rank or 0, num_ranks=2)
    slot_map = layer.global_map if rank is None else layer.local_map
    device_map = DeviceSlotMap(torch.from_numpy(slot_map.table), torch.from_numpy(slot_map.num_copies))
    scores, slots = torch.randn(7, 4), torch.full((7, 2), 999, dtype=torch.int32)
    ids, _ = route(scores, router_params(top_k=2), 6, slot_map=device_map, slots=slots)
    assert torch.equal(slots[:6], slot_map.find(ids[:6]))
    assert (slots[6] == -1).all()
    assert rank is None or (slots[:6] == -1).any()


# ---- align


def expected_tiles(slots: Tensor, num_slots: int, tile: int) -> tuple[list[int], list[int]]:
    pairs, slots_of_tiles = [], []
    for slot in range(num_slots):
        own = (slots.flatten() == slot).nonzero()[:, 0].tolist()
        own += [-1] * (-len(own) % tile)
        pairs += own
        slots_of_tiles += [slot] * (len(own) // tile)
    return pairs, slots_of_tiles


def check_align(slots: Tensor, num_slots: int, tile: int) -> None:
    tiles = PairTiles.empty(slots.numel(), num_slots, tile, CPU)
    for memory in (tiles.sorted_pairs, tiles.tile_slot, tiles.num_tiles):
        memory.fill_(-777)
    workspace = torch.full((align_workspace(slots.numel(), num_slots) + 5,), -777, dtype=torch.int32)
    align(slots, num_slots, tiles, workspace)
    pairs, slots_of_tiles = expected_tiles(slots, num_slots, tile)
    assert tiles.num_tiles.tolist() == [len(slots_of_tiles)]
    assert tiles.tile_slot[: len(slots_of_tiles)].tolist() == slots_of_tiles
    assert tiles.sorted_pairs[: len(pairs)].tolist() == pairs
    assert (tiles.sorted_pairs[len(pairs) :] == -777).all()
    assert (tiles.tile_slot[len(slots_of_tiles) :] == -777).all()
    assert (workspace[-5:] == -777).all()


@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 200),
    top_k=st.integers(1, 4),
    num_slots=st.integers(1, 6),
    tile=st.sampled_from([16, 64]),
    in_chunks=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_align_sorts_pairs_by_slot(
    num_tokens: int, top_k: int, num_slots: int, tile: int, in_chunks: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randint(-1, num_slots, (num_tokens, top_k), dtype=torch.int32, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routing, "ALL_AT_ONCE_PAIRS", 0 if in_chunks else 4096)
        patch.setattr(routing, "PAIR_BLOCK", 256)
        patch.setattr(routing, "PREFIX_BLOCK", 2)
        check_align(slots, num_slots, tile)


@pytest.mark.parametrize("limit", [0, 4096])
def test_align_extreme_slots_fit(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "ALL_AT_ONCE_PAIRS", limit)
    check_align(torch.full((20, 3), -1, dtype=torch.int32), 4, 16)
    check_align(torch.full((40, 1), 3, dtype=torch.int32), 4, 16)
    check_align(torch.arange(33, dtype=torch.int32)[:, None], 33, 16)


@given(num_pairs=st.integers(1, 300), num_slots=st.integers(1, 50), tile=st.sampled_from([16, 64]))
def test_max_tiles_is_the_most_that_pairs_need(num_pairs: int, num_slots: int, tile: int) -> None:
    used = min(num_pairs, num_slots)
    # one pair in each slot but one, which has the others, then full tiles moved to the other slots: no split needs more
    worst = max(
        sum(-(-size // tile) for size in (*[1] * (count - 1), num_pairs - count + 1)) for count in range(1, used + 1)
    )
    assert max_tiles(num_pairs, num_slots, tile) == worst


# ---- compilation

ROUTE = {
    "scores": "*bf16",
    "bias": "*fp32",
    "num_tokens": "*i32",
    "ids": "*i32",
    "weights": "*fp32",
    "table": "*i32",
    "num_copies": "*i32",
    "slots": "*i32",
    "counts": "*i64",
    "traced_ids": "*u16",
    **dict.fromkeys(("scores_stride", "trace_stride"), "i32"),
}
TILES = {"slots": "*i32", "sorted_pairs": "*i32", "tile_slot": "*i32", "num_tiles": "*i32", "num_pairs": "i32"}


@pytest.mark.parametrize("router", [pytest.param("many experts", marks=pytest.mark.grid), "DeepSeek-V3"])
@pytest.mark.parametrize("capability", HOPPER_FIRST)
def test_routing_kernels_compile(capability: int, router: str, tmp_path: Path) -> None:
    chunks = {"num_chunks": "i32"}
    counts = {"counts": "*i32", **chunks}
    cases: list[tuple[Any, dict[str, str], dict[str, Any], int]] = [
        (
            routing._route,
            ROUTE,
            routing.route_constants(*ROUTERS[router], torch.bfloat16, max_copies=2, counts=True, traces=True),
            1,
        ),
        (routing._align, TILES, {"TILE": 16, "NUM_SLOTS": 128, "SLOT_BLOCK": 256, "PAIR_BLOCK": 1024}, 4),
        (routing._align, TILES, {"TILE": 32, "NUM_SLOTS": 512, "SLOT_BLOCK": 1024, "PAIR_BLOCK": 128}, 4),
        (
            routing._count,
            {"slots": "*i32", "num_pairs": "i32", **counts},
            {"NUM_SLOTS": 512, "SLOT_BLOCK": 1024, "CHUNK": routing.CHUNK},
            4,
        ),
        (routing._sum_chunks, {**counts, "totals": "*i32"}, {"BLOCK": routing.PREFIX_BLOCK}, 4),
        (
            routing._place,
            TILES | counts | {"totals": "*i32"},
            {"TILE": 128, "NUM_SLOTS": 256, "SLOT_BLOCK": 512, "CHUNK": routing.CHUNK, "COMPARED": routing.COMPARED},
            4,
        ),
    ]
    for kernel, signature, constants, warps in cases:
        compiled = compile_kernel(
            *(kernel, signature, constants),
            capability=capability,
            num_warps=warps,
            num_stages=3,
            directory=tmp_path,
        )
        assert not compiled.spills
