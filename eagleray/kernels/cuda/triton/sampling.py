"""Choice of a token from logits: the first of the highest ones, or a random draw.

A draw defines the same distribution, of the same integer weights and uniform numbers, as the one for CPUs
(`worker/random_sampler.py`, whose mathematics are not repeated here). Tokens are ordered by their key, which is the
float32 of their distance below the highest logit, divided by the temperature, read as an integer; equal keys by id.
Equal keys have equal weights. What top_k and top_p keep is then a front of that order: all keys below a cut, and a
number of tokens at it.

A cut is found without a sort. A histogram over a range of keys has the sum of the weights, or the number, of the tokens
in each of `NUM_BUCKETS` intervals; the interval that the front ends in is the range of the next histogram. The first
range is the one in which weights lie, 128 intervals from a distance to its double; `NUM_LEVELS` histograms always end
at a single key. They are sums of integers, so they do not depend on the order in which programs add to them, nor on the
other rows. Equal keys are cut by id, which needs no histogram.

Programs work on splits of a row's logits. The last one that finishes a histogram reads it, and leaves zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.triton.sampling_records import (
    BAD_WORDS,
    COUNTS,
    FORCED,
    FORCED_FROM,
    MIN_WEIGHT,
    NUM_BAD_WORDS,
    NUM_FORCED,
    PREFIX_LENGTH,
    STREAM,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WEIGHT_OF_ONE,
    load_float,
    load_long,
    record_of,
)

SPLIT = 4096
"""Logits of one program."""

FINE = 0
NOT_FINITE = 1
"""The model's logits have no finite highest one."""
NOTHING_LEFT = 2
"""After the adjustments, logits have no finite highest one."""

NUM_BUCKETS = 2048
NUM_LEVELS = 4
"""The range of a bucket is 2**16 keys, or 2**30 of the first bucket: 5 + 11 and 8 + 11 + 11 bits."""

_FIRST_SHIFT = tl.constexpr(16)
_FIRST_BUCKET = tl.constexpr(0x3A00)  # the distance 2**-11, whose keys are the first of 16 octaves
_BUCKETS = tl.constexpr(NUM_BUCKETS)
_BUCKET_BITS = tl.constexpr(11)
_LOWEST_SHIFT = tl.constexpr(19)  # the range of the first bucket of the first level begins at 0
_ENDED = tl.constexpr(-1)
_INFINITE = tl.constexpr(0x7F800000)  # the key of a token with logit -inf, whose weight is 0: a cut here drops nothing
_FINE = tl.constexpr(FINE)
_NUM_WARPS = 8


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Memory between the launches of a step, for at most `num_rows` logits."""

    split_size: int
    best_values: Tensor
    """float32 [num_rows, num_splits]"""
    best_ids: Tensor
    """int32 [num_rows, num_splits]"""
    highest: Tensor
    """float32 [num_rows]"""
    cut_keys: Tensor
    """int32 [num_rows]: tokens with lower keys are kept …"""
    cut_counts: Tensor
    """int64 [num_rows]: … and this number of tokens at the key."""
    range_starts: Tensor
    """int32 [num_rows]: the first key of the next histogram."""
    range_shifts: Tensor
    """int32 [num_rows]: base-2 logarithm of the size of a bucket; -1 if no histogram is needed."""
    needed: Tensor
    """int64 [num_rows]: the weight or the number of tokens that the front takes from the range."""
    histogram: Tensor
    """int64 [num_rows, NUM_BUCKETS], all 0 between launches."""
    num_arrived: Tensor
    """int32 [num_rows]: number of programs that have added to the histogram, 0 between launches."""
    split_weights: Tensor
    """int64 [num_rows, num_splits]: weight of the tokens below the cut."""
    split_ties: Tensor
    """int32 [num_rows, num_splits]: number of tokens at the cut."""

    @classmethod
    def allocate(
        cls, num_rows: int, vocab_size: int, device: torch.device, split_size: int = SPLIT
    ) -> SamplingWorkspace:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros((num_rows, *shape), dtype=dtype, device=device)

        num_splits = triton.cdiv(vocab_size, split_size)
        return cls(
            split_size=split_size,
            best_values=zeros(num_splits, dtype=torch.float32),
            best_ids=zeros(num_splits),
            highest=zeros(dtype=torch.float32),
            cut_keys=zeros(),
            cut_counts=zeros(dtype=torch.int64),
            range_starts=zeros(),
            range_shifts=zeros(),
            needed=zeros(dtype=torch.int64),
            histogram=zeros(NUM_BUCKETS, dtype=torch.int64),
            num_arrived=zeros(),
            split_weights=zeros(num_splits, dtype=torch.int64),
            split_ties=zeros(num_splits),
        )


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """Inputs and outputs of the choice of a step's tokens, on one device."""

    logits: Tensor
    """float32 [n, vocab_size]; the features are contiguous."""
    rows: Tensor
    """int32 [n]: the row of each of the logits, no row twice."""
    positions: Tensor
    """int32 [n]: the positions that the tokens will have."""
    memory: Tensor
    """int32, flat: the records of the rows, and their lists."""
    counts: Tensor
    """int32 [num_entries, vocab_size]: see `IN_PROMPT`."""
    last_tokens: Tensor
    """int32 [max_rows]: the last token of each row."""
    token_ids: Tensor
    """int32 [n], written; 0 for logits that failed."""
    status: Tensor
    """int32 [n], written: `FINE`, `NOT_FINITE` or `NOTHING_LEFT`."""


def find_first(tensors: SamplingTensors, workspace: SamplingWorkspace, *, is_adjusted: bool, is_chosen: bool) -> None:
    """Find the first of the highest logits of each row, and whether it is finite.

    `is_adjusted`: these are the logits after the adjustments, and the earlier failures stay. `is_chosen`: the first
    token is the chosen one, for every row.
    """
    n, vocab_size = tensors.logits.shape
    num_splits = workspace.best_values.shape[1]
    _find_first_of_splits[(n, num_splits)](
        tensors.logits,
        workspace.best_values,
        workspace.best_ids,
        vocab_size,
        tensors.logits.stride(0),
        SPLIT=workspace.split_size,
        num_warps=_NUM_WARPS,
    )
    _merge_first[(n,)](
        workspace.best_values,
        workspace.best_ids,
        workspace.highest,
        workspace.cut_keys,
        workspace.cut_counts,
        workspace.range_shifts,
        *_outputs(tensors),
        vocab_size,
        num_splits,
        PADDED_SPLITS=triton.next_power_of_2(num_splits),
        FAILURE=NOTHING_LEFT if is_adjusted else NOT_FINITE,
        IS_ADJUSTED=is_adjusted,
        IS_CHOSEN=is_chosen,
    )


def cut_front(tensors: SamplingTensors, workspace: SamplingWorkspace, *, by_weight: bool) -> None:
    """Cut what top_p drops (`by_weight`), or top_k, of the rows that have one. The cut of top_k comes first."""
    n, vocab_size = tensors.logits.shape
    num_splits = workspace.best_values.shape[1]
    for level in range(NUM_LEVELS):
        _cut_front[(n, num_splits)](
            tensors.logits,
            tensors.rows,
            tensors.memory,
            tensors.status,
            workspace.highest,
            workspace.cut_keys,
            workspace.cut_counts,
            workspace.range_starts,
            workspace.range_shifts,
            workspace.needed,
            workspace.histogram,
            workspace.num_arrived,
            vocab_size,
            tensors.logits.stride(0),
            num_splits,
            IS_FIRST_LEVEL=level == 0,
            BY_WEIGHT=by_weight,
            SPLIT=workspace.split_size,
            num_warps=_NUM_WARPS,
        )


def draw(tensors: SamplingTensors, workspace: SamplingWorkspace) -> None:
    """Choose the token of each row: a draw from what the cuts keep, or the first one if the row is greedy."""
    n, vocab_size = tensors.logits.shape
    num_splits = workspace.best_values.shape[1]
    _weigh_splits[(n, num_splits)](
        tensors.logits,
        tensors.rows,
        tensors.memory,
        tensors.status,
        workspace.highest,
        workspace.cut_keys,
        workspace.split_weights,
        workspace.split_ties,
        vocab_size,
        tensors.logits.stride(0),
        SPLIT=workspace.split_size,
        num_warps=_NUM_WARPS,
    )
    _pick[(n,)](
        tensors.logits,
        workspace.highest,
        workspace.cut_keys,
        workspace.cut_counts,
        workspace.split_weights,
        workspace.split_ties,
        *_outputs(tensors),
        vocab_size,
        tensors.logits.stride(0),
        num_splits,
        PADDED_SPLITS=triton.next_power_of_2(num_splits),
        SPLIT=workspace.split_size,
        num_warps=_NUM_WARPS,
    )


def _outputs(tensors: SamplingTensors) -> tuple[Tensor, ...]:
    return (
        tensors.rows,
        tensors.positions,
        tensors.memory,
        tensors.counts,
        tensors.last_tokens,
        tensors.token_ids,
        tensors.status,
    )


@triton.jit
def _find_first_of_splits(logits, best_values, best_ids, vocab_size, stride, SPLIT: tl.constexpr):
    line, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = split * SPLIT + tl.arange(0, SPLIT)
    values = tl.load(logits + line * stride + ids, mask=ids < vocab_size, other=float("-inf"))
    values = tl.where(values != values, float("inf"), values)  # not finite, like NaN
    highest = tl.max(values, 0)
    target = line * tl.num_programs(1) + split
    tl.store(best_values + target, highest)
    tl.store(best_ids + target, tl.min(tl.where(values == highest, ids, vocab_size), 0))


@triton.jit
def _merge_first(
    best_values,
    best_ids,
    highest,
    cut_keys,
    cut_counts,
    range_shifts,
    rows,
    positions,
    memory,
    counts,
    last_tokens,
    token_ids,
    status,
    vocab_size,
    num_splits,
    PADDED_SPLITS: tl.constexpr,
    FAILURE: tl.constexpr,
    IS_ADJUSTED: tl.constexpr,
    IS_CHOSEN: tl.constexpr,
):
    line = tl.program_id(0)
    splits = tl.arange(0, PADDED_SPLITS)
    at = line * num_splits + splits
    values = tl.load(best_values + at, mask=splits < num_splits, other=float("-inf"))
    ids = tl.load(best_ids + at, mask=splits < num_splits, other=vocab_size)
    value = tl.max(values, 0)
    token = tl.min(tl.where(values == value, ids, vocab_size), 0)
    failure = tl.where(tl.abs(value) == float("inf"), FAILURE, _FINE)
    if IS_ADJUSTED:
        earlier = tl.load(status + line)
        failure = tl.where(earlier != _FINE, earlier, failure)
    tl.store(status + line, failure)
    tl.store(highest + line, value)
    tl.store(cut_keys + line, _INFINITE)
    tl.store(cut_counts + line, tl.zeros((), tl.int64))
    tl.store(range_shifts + line, _ENDED)
    token = tl.where(failure != _FINE, 0, token)
    if IS_CHOSEN:
        _choose(line, token, failure, rows, positions, memory, counts, last_tokens, token_ids, vocab_size)
    else:
        tl.store(token_ids + line, token)


@triton.jit
def _choose(line, token, failure, rows, positions, memory, counts, last_tokens, token_ids, vocab_size):
    """Write the token, or the one that the row forces at this position, to all places that later steps read."""
    record = record_of(memory, rows, line)
    index = tl.load(positions + line) - tl.load(record + FORCED_FROM)
    is_forced = (index >= 0) & (index < tl.load(record + NUM_FORCED)) & (failure == _FINE)
    token = tl.load(memory + tl.load(record + FORCED) + index, mask=is_forced, other=token)
    tl.store(token_ids + line, token)
    tl.store(last_tokens + tl.load(rows + line), token)
    entry = tl.load(record + COUNTS)
    count = counts + entry.to(tl.int64) * vocab_size + token
    is_counted = (entry >= 0) & (failure == _FINE)
    tl.store(count, tl.load(count, mask=is_counted, other=0) + 1, mask=is_counted)
    length = tl.load(record + PREFIX_LENGTH)
    has_ring = (tl.load(record + NUM_BAD_WORDS) > 0) & (length > 0)
    place = tl.load(positions + line) % tl.where(has_ring, length, 1)
    tl.store(memory + tl.load(record + BAD_WORDS) + place, token, mask=has_ring)


@triton.jit
def _load_keys(logits, ids, vocab_size, highest, temperature):
    """Return the keys of tokens; those beyond the vocabulary have the key of -inf."""
    values = tl.load(logits + ids, mask=ids < vocab_size, other=float("-inf"))
    distances = tl.abs(highest - values)  # 0.0 below -0.0 is -0.0, whose bits are not the lowest key
    return tl.div_rn(distances, tl.zeros_like(distances) + temperature).to(tl.int32, bitcast=True)


@triton.jit
def _weights_of(keys, min_weight):
    weights = (tl.exp(-keys.to(tl.float32, bitcast=True)) * WEIGHT_OF_ONE).to(tl.int64)
    return tl.where(weights < min_weight, tl.zeros_like(weights), weights)


@triton.jit
def _bucket_of(keys, start, shift, IS_FIRST_LEVEL: tl.constexpr):
    """Return the index of the bucket of each key. After the first level, a key outside of the range that is divided
    gets an index outside of [0, NUM_BUCKETS)."""
    if IS_FIRST_LEVEL:
        buckets = tl.minimum(tl.maximum((keys >> _FIRST_SHIFT) - _FIRST_BUCKET, 0), _BUCKETS - 1)
    else:
        buckets = (keys - start) >> shift
    return buckets


@triton.jit
def _cut_front(
    logits,
    rows,
    memory,
    status,
    highest,
    cut_keys,
    cut_counts,
    range_starts,
    range_shifts,
    needed,
    histogram,
    num_arrived,
    vocab_size,
    stride,
    num_splits,
    IS_FIRST_LEVEL: tl.constexpr,
    BY_WEIGHT: tl.constexpr,
    SPLIT: tl.constexpr,
):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    temperature = load_float(record, TEMPERATURE)
    if IS_FIRST_LEVEL:
        if BY_WEIGHT:
            is_cut = load_long(record, TOP_P).to(tl.float64, bitcast=True) < 1.0
        else:
            is_cut = tl.load(record + TOP_K) < vocab_size
        is_cut = is_cut & (temperature > 0) & (tl.load(status + line) == _FINE)
        start, shift = 0, 0
    else:
        start, shift = tl.load(range_starts + line), tl.load(range_shifts + line)
        is_cut = shift != _ENDED
    if not is_cut:
        return

    # add this split's tokens to the histogram
    cut_key = tl.load(cut_keys + line)  # that of top_k when top_p is applied
    ids = tl.program_id(1) * SPLIT + tl.arange(0, SPLIT)
    keys = _load_keys(logits + line.to(tl.int64) * stride, ids, vocab_size, tl.load(highest + line), temperature)
    buckets = _bucket_of(keys, start, shift, IS_FIRST_LEVEL)
    is_inside = (keys < cut_key) & (buckets >= 0) & (buckets < _BUCKETS)
    min_weight = load_long(record, MIN_WEIGHT).to(tl.int64)
    if BY_WEIGHT:
        amounts = _weights_of(keys, min_weight)
        is_inside = is_inside & (amounts > 0)
    else:
        amounts = tl.full((SPLIT,), 1, tl.int64)
        if IS_FIRST_LEVEL:  # the tokens of the last bucket have no weight, and may all stay
            is_inside = is_inside & (buckets < _BUCKETS - 1)
    own_histogram = histogram + line.to(tl.int64) * _BUCKETS
    tl.atomic_add(own_histogram + buckets, amounts, mask=is_inside, sem="relaxed")

    # the atomic operations of all threads come before the arrival of the program
    tl.debug_barrier()
    if tl.atomic_add(num_arrived + line, 1, sem="acq_rel") != num_splits - 1:
        return
    tl.store(num_arrived + line, 0)
    bucket = tl.arange(0, _BUCKETS)
    sums = tl.atomic_xchg(own_histogram + bucket, tl.zeros((_BUCKETS,), tl.int64), sem="relaxed")
    if BY_WEIGHT:  # the tokens at the cut of top_k that it keeps
        tie_weight = tl.load(cut_counts + line) * _weights_of(cut_key, min_weight)
        sums += tl.where(bucket == _bucket_of(cut_key, start, shift, IS_FIRST_LEVEL), tie_weight, 0)
    if IS_FIRST_LEVEL:
        if BY_WEIGHT:
            top_p = load_long(record, TOP_P).to(tl.float64, bitcast=True)
            need = tl.ceil(top_p * tl.sum(sums, 0).to(tl.float64)).to(tl.int64)
        else:
            need = tl.load(record + TOP_K).to(tl.int64)
    else:
        need = tl.load(needed + line)

    # the front ends in the first bucket at which the sums reach the need
    is_before = tl.cumsum(sums, 0) < need
    edge = tl.sum(is_before.to(tl.int32), 0)
    need -= tl.sum(tl.where(is_before, sums, 0), 0)
    if IS_FIRST_LEVEL:
        if edge < _BUCKETS:  # else top_k keeps every token that has a weight
            tl.store(range_starts + line, tl.where(edge == 0, 0, (edge + _FIRST_BUCKET) << _FIRST_SHIFT))
            tl.store(range_shifts + line, tl.where(edge == 0, _LOWEST_SHIFT, _FIRST_SHIFT - _BUCKET_BITS))
            tl.store(needed + line, need)
    else:
        start += edge << shift
        if shift == 0:
            if BY_WEIGHT:
                weight = _weights_of(start, min_weight)
                need = (need + weight - 1) // weight
            tl.store(cut_keys + line, start)
            tl.store(cut_counts + line, need)
            tl.store(range_shifts + line, _ENDED)
        else:
            tl.store(range_starts + line, start)
            tl.store(range_shifts + line, tl.maximum(shift - _BUCKET_BITS, 0))
            tl.store(needed + line, need)


@triton.jit
def _weigh_splits(
    logits,
    rows,
    memory,
    status,
    highest,
    cut_keys,
    split_weights,
    split_ties,
    vocab_size,
    stride,
    SPLIT: tl.constexpr,
):
    line, split = tl.program_id(0), tl.program_id(1)
    record = record_of(memory, rows, line)
    temperature = load_float(record, TEMPERATURE)
    if (temperature <= 0) | (tl.load(status + line) != _FINE):
        return
    ids = split * SPLIT + tl.arange(0, SPLIT)
    keys = _load_keys(logits + line.to(tl.int64) * stride, ids, vocab_size, tl.load(highest + line), temperature)
    weights = _weights_of(keys, load_long(record, MIN_WEIGHT).to(tl.int64))
    cut_key = tl.load(cut_keys + line)
    target = line * tl.num_programs(1) + split
    tl.store(split_weights + target, tl.sum(tl.where(keys < cut_key, weights, 0), 0))
    tl.store(split_ties + target, tl.sum((keys == cut_key).to(tl.int32), 0))


@triton.jit
def _mix(state):
    """Return the output of SplitMix64 for a state of its counter."""
    state = (state ^ (state >> 30)) * tl.full((), 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full((), 0x94D049BB133111EB, tl.uint64)
    return state ^ (state >> 31)


@triton.jit
def _uniform(stream, position):
    """Return the number of the open interval (0, 1), float64, that the stream has for the position."""
    bits = _mix(stream + (position.to(tl.uint64) + 1) * tl.full((), 0x9E3779B97F4A7C15, tl.uint64))
    return ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2**-52


@triton.jit
def _pick(
    logits,
    highest,
    cut_keys,
    cut_counts,
    split_weights,
    split_ties,
    rows,
    positions,
    memory,
    counts,
    last_tokens,
    token_ids,
    status,
    vocab_size,
    stride,
    num_splits,
    PADDED_SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    temperature = load_float(record, TEMPERATURE)
    failure = tl.load(status + line)
    token = tl.load(token_ids + line)
    if (temperature > 0) & (failure == _FINE):
        min_weight = load_long(record, MIN_WEIGHT).to(tl.int64)
        cut_key, cut_count = tl.load(cut_keys + line), tl.load(cut_counts + line)

        # weight that each split keeps: of the tokens at the cut the first ones by id
        splits = tl.arange(0, PADDED_SPLITS)
        at = line * num_splits + splits
        ties = tl.load(split_ties + at, mask=splits < num_splits, other=0).to(tl.int64)
        kept_ties = tl.minimum(tl.maximum(cut_count - (tl.cumsum(ties, 0) - ties), 0), ties)
        sums = tl.load(split_weights + at, mask=splits < num_splits, other=0)
        sums += kept_ties * _weights_of(cut_key, min_weight)

        # the split, then the token in it, at which the sum of weights exceeds the target
        total = tl.sum(sums, 0)
        share = _uniform(load_long(record, STREAM), tl.load(positions + line)) * total.to(tl.float64)
        target = tl.minimum(share.to(tl.int64), total - 1)
        is_before = tl.cumsum(sums, 0) <= target
        target -= tl.sum(tl.where(is_before, sums, 0), 0)
        num_ties = cut_count - tl.sum(tl.where(is_before, ties, 0), 0)
        first = tl.sum(is_before.to(tl.int32), 0) * SPLIT
        ids = first + tl.arange(0, SPLIT)
        keys = _load_keys(logits + line.to(tl.int64) * stride, ids, vocab_size, tl.load(highest + line), temperature)
        is_tie = keys == cut_key
        is_kept = (keys < cut_key) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= num_ties))
        weights = tl.where(is_kept, _weights_of(keys, min_weight), 0)
        token = first + tl.sum((tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
    _choose(line, token, failure, rows, positions, memory, counts, last_tokens, token_ids, vocab_size)
