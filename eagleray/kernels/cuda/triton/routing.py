"""The choice of each token's experts, and the order in which their products are computed.

`route` chooses experts and finds the slots that hold their weights; `align` sorts the pairs of a token and a slot by
slot and divides each slot's pairs into tiles, which `grouped_linear` multiplies. All numbers stay on the device, and
no order depends on the time at which programs run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.params import RouterParams

LOWEST = tl.constexpr(-(1 << 63))
"""Key of an expert that must not be chosen."""

ALL_AT_ONCE_PAIRS = 4096
"""Up to this number of pairs one launch sorts them."""
PAIR_BLOCK = 1024
"""Pairs that a program of that launch reads at a time."""

CHUNK = 256
"""Pairs that a program counts and places if there are more."""
COMPARED = 32
"""Pairs of a chunk that are compared with all others at a time."""
PREFIX_BLOCK = 1024
"""Chunks whose counts are summed at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class DeviceSlotMap:
    """An `ExpertSlotMap` on the device: int32 tensors that are changed in place."""

    table: Tensor
    """[num_experts, max_copies]"""
    num_copies: Tensor
    """[num_experts]"""


# ---- route


def route(
    scores: Tensor,
    router: RouterParams,
    *,
    num_tokens: Tensor,
    dtype: torch.dtype,
    ids: Tensor,
    weights: Tensor,
    slot_map: DeviceSlotMap | None = None,
    slots: Tensor | None = None,
    counts: Tensor | None = None,
    traced_ids: Tensor | None = None,
) -> None:
    """Write the experts of each token, the likeliest first and of equal ones that with the lower id, to `ids` int32
    [rows, top_k], their weights to `weights` float32 [rows, top_k], and their slots to `slots` int32 [rows, top_k].

    `scores`: [rows, num_experts] of any dtype, with any distance between rows. `num_tokens`: int32 [1]; the rows from
    there on are padding: they get ids and slots of -1 and weights of 0. `dtype`: the model's, to which weights are
    rounded if the router says so. Copies of an expert take turns over the rows.
    The number of tokens of each expert is added to `counts` int64 [num_experts]; `traced_ids` uint8 or uint16 [at least
    rows, top_k], strided by row, gets the ids of the tokens. Scores of NaN count as the highest.
    """
    num_rows, num_experts = scores.shape
    router.check(num_experts)
    assert scores.stride(1) == 1 and ids.shape == weights.shape == (num_rows, router.top_k)
    assert ids.is_contiguous() and weights.is_contiguous() and (slots is None) == (slot_map is None)
    assert slots is None or (slots.shape == ids.shape and slots.is_contiguous())
    assert traced_ids is None or (len(traced_ids) >= num_rows and traced_ids.stride(1) == 1)
    bias = router.correction_bias
    unused = ids  # a pointer that is never followed
    _route[(num_rows,)](
        scores,
        unused if bias is None else bias,
        num_tokens,
        ids,
        weights,
        *((unused, unused) if slot_map is None else (slot_map.table, slot_map.num_copies)),
        unused if slots is None else slots,
        unused if counts is None else counts,
        unused if traced_ids is None else traced_ids,
        scores.stride(0),
        0 if traced_ids is None else traced_ids.stride(0),
        **route_constants(
            router,
            num_experts,
            dtype,
            max_copies=0 if slot_map is None else slot_map.table.shape[1],
            counts=counts is not None,
            traces=traced_ids is not None,
        ),
        num_warps=1,
    )


def route_constants(
    router: RouterParams, num_experts: int, dtype: torch.dtype, *, max_copies: int, counts: bool, traces: bool
) -> dict[str, object]:
    """Return the constants that `_route` is compiled for. `max_copies` is 0 without a slot map."""
    takes_sums = router.num_groups > 1 and router.group_score == "top2"
    group_size = num_experts // router.num_groups
    return {
        "TOP_K": router.top_k,
        "TOP_K_BLOCK": triton.next_power_of_2(router.top_k),
        "NUM_GROUPS": router.num_groups,
        "GROUP_BLOCK": triton.next_power_of_2(router.num_groups),
        "GROUP_SIZE": group_size,
        "SIZE_BLOCK": triton.next_power_of_2(group_size),
        "TOP_GROUPS": router.top_groups,
        "TAKES_SUMS": takes_sums,
        "SIGMOID": router.scoring == "sigmoid",
        # a softmax alone does not change the order of the scores
        "BY_SCORE": router.scoring == "softmax" and router.correction_bias is None and not takes_sums,
        "HAS_BIAS": router.correction_bias is not None,
        "RENORMALIZE": router.renormalize,
        "RENORMALIZE_EPS": router.renormalize_eps,
        "SCALE": router.scale,
        "ROUNDED": {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[
            dtype if router.round_weights else torch.float32
        ],
        "MAX_COPIES": max_copies,
        "COUNTS": counts,
        "TRACES": traces,
    }


@triton.jit(do_not_specialize_on_alignment=["traced_ids"])
def _route(
    scores,
    bias,
    num_tokens,
    ids,
    weights,
    table,
    num_copies,
    slots,
    counts,
    traced_ids,
    scores_stride,
    trace_stride,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    SIZE_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TAKES_SUMS: tl.constexpr,
    SIGMOID: tl.constexpr,
    BY_SCORE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    RENORMALIZE_EPS: tl.constexpr,
    SCALE: tl.constexpr,
    ROUNDED: tl.constexpr,
    MAX_COPIES: tl.constexpr,
    COUNTS: tl.constexpr,
    TRACES: tl.constexpr,
):
    row = tl.program_id(0)
    places = tl.arange(0, TOP_K_BLOCK)
    pairs = row * TOP_K + places
    is_place = places < TOP_K
    if row >= tl.load(num_tokens):
        absent = tl.full((TOP_K_BLOCK,), -1, tl.int32)
        tl.store(ids + pairs, absent, mask=is_place)
        tl.store(weights + pairs, tl.zeros((TOP_K_BLOCK,), tl.float32), mask=is_place)
        if MAX_COPIES > 0:
            tl.store(slots + pairs, absent, mask=is_place)
        return

    groups = tl.arange(0, GROUP_BLOCK)
    members = tl.arange(0, SIZE_BLOCK)
    experts = groups[:, None] * GROUP_SIZE + members[None, :]  # [groups, experts of a group]
    is_expert = (groups[:, None] < NUM_GROUPS) & (members[None, :] < GROUP_SIZE)
    scores += row.to(tl.int64) * scores_stride
    own = tl.load(scores + experts, mask=is_expert, other=float("-inf")).to(tl.float32)
    highest = tl.max(tl.max(own, 1), 0)  # of a softmax with NaN the denominator is NaN, whatever this is
    total = tl.sum(tl.sum(tl.where(is_expert, tl.exp(own - highest), 0.0), 1), 0)
    values = own
    if not BY_SCORE:
        values = _probability(own, highest, total, SIGMOID)
    if HAS_BIAS:
        values += tl.load(bias + experts, mask=is_expert, other=0.0)
    keys = tl.where(is_expert, _key(values, experts), LOWEST)
    if NUM_GROUPS > 1:
        is_best = _best_groups(keys, groups, NUM_GROUPS, TOP_GROUPS, TAKES_SUMS)
        keys = tl.where(is_best[:, None], keys, LOWEST)

    keys = tl.reshape(keys, (GROUP_BLOCK * SIZE_BLOCK,))
    chosen = tl.zeros((TOP_K_BLOCK,), tl.int32)
    for place in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        chosen = tl.where(places == place, _index_of(best), chosen)
        keys = tl.where(keys == best, LOWEST, keys)

    chosen_scores = tl.load(scores + chosen, mask=is_place, other=0.0).to(tl.float32)
    result = tl.where(is_place, _probability(chosen_scores, highest, total, SIGMOID), 0.0)
    if RENORMALIZE:
        result = result / (tl.sum(result, 0) + RENORMALIZE_EPS)
    result = (result * SCALE).to(ROUNDED).to(tl.float32)
    tl.store(weights + pairs, result, mask=is_place)
    tl.store(ids + pairs, chosen, mask=is_place)
    if MAX_COPIES > 0:
        copy = row % tl.load(num_copies + chosen, mask=is_place, other=1)
        slot = tl.load(table + chosen * MAX_COPIES + copy, mask=is_place, other=-1)
        tl.store(slots + pairs, slot, mask=is_place)
    if COUNTS:
        tl.atomic_add(counts + chosen, tl.full((TOP_K_BLOCK,), 1, tl.int64), mask=is_place, sem="relaxed")
    if TRACES:
        traced_ids += row.to(tl.int64) * trace_stride + places
        tl.store(traced_ids, chosen.to(traced_ids.dtype.element_ty), mask=is_place)


@triton.jit
def _probability(scores, highest, total, SIGMOID: tl.constexpr):
    if SIGMOID:
        return 1.0 / (1.0 + tl.exp(-scores))
    return tl.exp(scores - highest) / total


@triton.jit
def _key(values, indices):
    """Return int64 keys in the order of float32 values, NaN highest, and of equal values the lower index highest."""
    values = tl.where(values == 0.0, 0.0, values)  # the two zeros are equal
    bits = values.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    order = tl.where(values != values, 0x7FFFFFFF, order)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - indices).to(tl.int64)


@triton.jit
def _index_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _value_of(key):
    order = (key >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_groups(keys, groups, NUM_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TAKES_SUMS: tl.constexpr):
    """Return which groups are candidates. `keys` are [groups, experts of a group]."""
    best = tl.max(keys, 1)
    values = _value_of(best)
    if TAKES_SUMS:
        values += _value_of(tl.max(tl.where(keys == best[:, None], LOWEST, keys), 1))
    group_keys = tl.where(groups < NUM_GROUPS, _key(values, groups), LOWEST)
    is_best = groups < 0
    for _ in tl.static_range(TOP_GROUPS):
        is_next = group_keys == tl.max(group_keys, 0)
        is_best = is_best | is_next
        group_keys = tl.where(is_next, LOWEST, group_keys)
    return is_best


# ---- align


@dataclass(frozen=True, slots=True, eq=False)
class PairTiles:
    """The pairs of a token and a slot, sorted by slot, in tiles of the same slot. Pair p is expert p % top_k of token
    p // top_k. Memory of the caller, written by `align`."""

    sorted_pairs: Tensor
    """int32 [max_tiles * tile]: pairs sorted by slot and number; -1 fills a slot's last tile"""
    tile_slot: Tensor
    """int32 [max_tiles] slot of each tile"""
    num_tiles: Tensor
    """int32 [1]; what lies behind these tiles is not defined"""
    tile: int
    """Pairs of a tile."""

    @classmethod
    def empty(cls, num_pairs: int, num_slots: int, tile: int, device: torch.device) -> Self:
        """Allocate tiles of as many pairs as there may be."""
        capacity = max_tiles(num_pairs, num_slots, tile)
        sorted_pairs, tile_slot, num_tiles = (
            torch.empty(size, dtype=torch.int32, device=device) for size in (capacity * tile, capacity, 1)
        )
        return cls(sorted_pairs, tile_slot, num_tiles, tile)


def max_tiles(num_pairs: int, num_slots: int, tile: int) -> int:
    """Return the most tiles that pairs of any slots can need."""
    used = min(num_slots, num_pairs)  # slots with a pair; each may leave all but one pair of its last tile empty
    return (num_pairs + used * (tile - 1)) // tile


def align_workspace(num_pairs: int, num_slots: int) -> int:
    """Return the length of the int32 workspace that `align` needs."""
    return 0 if num_pairs <= ALL_AT_ONCE_PAIRS else num_slots * (triton.cdiv(num_pairs, CHUNK) + 1)


def align(slots: Tensor, num_slots: int, tiles: PairTiles, workspace: Tensor) -> None:
    """Sort pairs by slot into `tiles`. `slots`: int32 [num_tokens, top_k]; pairs with a negative one are left out.
    `workspace`: int32, of at least `align_workspace`."""
    num_pairs = slots.numel()
    assert slots.is_contiguous() and len(tiles.tile_slot) >= max_tiles(num_pairs, num_slots, tiles.tile)
    assert len(tiles.sorted_pairs) >= len(tiles.tile_slot) * tiles.tile
    assert len(workspace) >= align_workspace(num_pairs, num_slots)
    written = tiles.sorted_pairs, tiles.tile_slot, tiles.num_tiles
    bins = slot_block(num_slots)
    if num_pairs <= ALL_AT_ONCE_PAIRS:
        sizes = {"NUM_SLOTS": num_slots, "SLOT_BLOCK": bins, "PAIR_BLOCK": pair_block(num_pairs)}
        _align[(num_slots,)](slots, *written, num_pairs, TILE=tiles.tile, **sizes, num_warps=4)
        return
    num_chunks = triton.cdiv(num_pairs, CHUNK)
    counts, totals = workspace[: num_slots * num_chunks], workspace[num_slots * num_chunks :]
    _count[(num_chunks,)](
        slots, counts, num_pairs, num_chunks, NUM_SLOTS=num_slots, SLOT_BLOCK=bins, CHUNK=CHUNK, num_warps=4
    )
    _sum_chunks[(num_slots,)](counts, totals, num_chunks, BLOCK=PREFIX_BLOCK, num_warps=4)
    _place[(num_chunks + num_slots,)](
        *(slots, counts, totals, *written, num_pairs, num_chunks),
        TILE=tiles.tile,
        NUM_SLOTS=num_slots,
        SLOT_BLOCK=bins,
        CHUNK=CHUNK,
        COMPARED=COMPARED,
        num_warps=4,
    )


def slot_block(num_slots: int) -> int:
    """Return the number of bins for the slots and one for pairs without a slot, at least one for each thread."""
    return max(triton.next_power_of_2(num_slots + 1), 128)


def pair_block(num_pairs: int) -> int:
    """Return the number of pairs that a program of `_align` reads at a time."""
    return min(max(triton.next_power_of_2(num_pairs), 128), PAIR_BLOCK)


@triton.jit(do_not_specialize=["num_pairs"])
def _align(
    slots,
    sorted_pairs,
    tile_slot,
    num_tiles,
    num_pairs,
    TILE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    PAIR_BLOCK: tl.constexpr,
):
    """Each program counts the pairs of all slots, and writes those of one slot."""
    slot = tl.program_id(0)
    counts = tl.zeros((SLOT_BLOCK,), tl.int32)
    for start in tl.range(0, num_pairs, PAIR_BLOCK):
        counts += _histogram(slots, start, num_pairs, NUM_SLOTS, SLOT_BLOCK, PAIR_BLOCK)
    bins = tl.arange(0, SLOT_BLOCK)
    tiles = (tl.where(bins < NUM_SLOTS, counts, 0) + TILE - 1) // TILE
    first_tile = tl.sum(tl.where(bins < slot, tiles, 0), 0)
    own_count = tl.sum(tl.where(bins == slot, counts, 0), 0)
    if slot == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))
    _finish_slot(sorted_pairs, tile_slot, slot, first_tile, own_count, TILE)
    place = first_tile * TILE
    for start in tl.range(0, num_pairs, PAIR_BLOCK):
        pairs = start + tl.arange(0, PAIR_BLOCK)
        is_own = tl.load(slots + pairs, mask=pairs < num_pairs, other=-1) == slot
        ranks = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(sorted_pairs + place + ranks - 1, pairs, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)


@triton.jit
def _histogram(slots, start, num_pairs, NUM_SLOTS: tl.constexpr, SLOT_BLOCK: tl.constexpr, PAIR_BLOCK: tl.constexpr):
    """Return the number of pairs of each slot in a block. Pairs without a slot are counted behind the slots."""
    pairs = start + tl.arange(0, PAIR_BLOCK)
    found = tl.load(slots + pairs, mask=pairs < num_pairs, other=-1)
    return tl.histogram(tl.where(found < 0, NUM_SLOTS, found), SLOT_BLOCK)


@triton.jit
def _finish_slot(sorted_pairs, tile_slot, slot, first_tile, count, TILE: tl.constexpr):
    """Write the slot of each tile, and -1 behind the pairs of the last one."""
    last = (count + TILE - 1) // TILE
    for tile in tl.range(0, last):
        tl.store(tile_slot + first_tile + tile, slot)
    places = count + tl.arange(0, TILE)
    missing = tl.full((TILE,), -1, tl.int32)
    tl.store(sorted_pairs + first_tile * TILE + places, missing, mask=places < last * TILE)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"])
def _count(
    slots,
    counts,
    num_pairs,
    num_chunks,
    NUM_SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count the pairs of each slot in each chunk: `counts` int32 [slots, chunks]."""
    chunk = tl.program_id(0)
    found = _histogram(slots, chunk * CHUNK, num_pairs, NUM_SLOTS, SLOT_BLOCK, CHUNK)
    bins = tl.arange(0, SLOT_BLOCK)
    tl.store(counts + bins * num_chunks + chunk, found, mask=bins < NUM_SLOTS)


@triton.jit(do_not_specialize=["num_chunks"], do_not_specialize_on_alignment=["totals"])
def _sum_chunks(counts, totals, num_chunks, BLOCK: tl.constexpr):
    """Replace the count of each chunk by the sum of the chunks before it, and write the sum of all to `totals`."""
    slot = tl.program_id(0)
    counts += slot * num_chunks
    total = 0
    for start in tl.range(0, num_chunks, BLOCK):
        chunks = start + tl.arange(0, BLOCK)
        found = tl.load(counts + chunks, mask=chunks < num_chunks, other=0)
        tl.store(counts + chunks, total + tl.cumsum(found, 0) - found, mask=chunks < num_chunks)
        total += tl.sum(found, 0)
    tl.store(totals + slot, total)


@triton.jit(do_not_specialize=["num_pairs", "num_chunks"], do_not_specialize_on_alignment=["totals"])
def _place(
    slots,
    counts,
    totals,
    sorted_pairs,
    tile_slot,
    num_tiles,
    num_pairs,
    num_chunks,
    TILE: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    COMPARED: tl.constexpr,
):
    """Write the pairs of a chunk, or the tiles of a slot."""
    program = tl.program_id(0)
    bins = tl.arange(0, SLOT_BLOCK)
    sizes = tl.load(totals + bins, mask=bins < NUM_SLOTS, other=0)
    tiles = (sizes + TILE - 1) // TILE
    if program >= num_chunks:
        slot = program - num_chunks
        first_tile = tl.sum(tl.where(bins < slot, tiles, 0), 0)
        if slot == 0:
            tl.store(num_tiles, tl.sum(tiles, 0))
        _finish_slot(sorted_pairs, tile_slot, slot, first_tile, tl.load(totals + slot), TILE)
    else:
        start = program * CHUNK
        indices = tl.arange(0, CHUNK)
        is_pair = start + indices < num_pairs
        own = tl.load(slots + start + indices, mask=is_pair, other=-1)
        ranks = tl.zeros((CHUNK,), tl.int32)  # pairs of the same slot before each pair
        for first in tl.range(0, CHUNK, COMPARED):
            others = first + tl.arange(0, COMPARED)
            slots_of_others = tl.load(slots + start + others, mask=start + others < num_pairs, other=-1)
            is_before = (own[:, None] == slots_of_others[None, :]) & (others[None, :] < indices[:, None])
            ranks += tl.sum(is_before.to(tl.int32), 1)
        is_placed = own >= 0
        earlier = tl.load(counts + own * num_chunks + program, mask=is_placed, other=0)
        first_tiles = tl.cumsum(tiles, 0) - tiles
        tiles_before = tl.gather(first_tiles, tl.where(is_placed, own, 0), 0)
        tl.store(sorted_pairs + tiles_before * TILE + earlier + ranks, start + indices, mask=is_placed)
