"""Changes of logits before a token is chosen: masks of grammars, allowed tokens, bad words, suppressed tokens, bias,
penalties.

Each function changes float32 logits [n, vocab_size] in place, for the rows that ask for it in their records, or have a
mask. `memory` has the records, `rows` int32 [n] the row of each of the logits.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.triton.sampling_records import (
    ALLOWED,
    ANY,
    BAD_WORDS,
    BIAS,
    COUNTS,
    FREE_FROM,
    FREQUENCY,
    NUM_BAD_WORDS,
    NUM_BIASES,
    NUM_SUPPRESSED,
    PREFIX_LENGTH,
    PRESENCE,
    PROMPT_BIT,
    REPETITION,
    SUPPRESSED,
    load_float,
    record_of,
)

BLOCK = 1024
_LIST_BLOCK = 128


def keep_allowed(logits: Tensor, memory: Tensor, rows: Tensor) -> None:
    """Forbid the tokens that are not allowed."""
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    _keep_allowed[grid](logits, memory, rows, logits.shape[1], logits.stride(0), BLOCK=BLOCK)


def keep_masked(logits: Tensor, indices: Tensor, masks: Tensor) -> None:
    """Forbid the tokens that are not in the mask of their row.

    indices: int32 [m], of logits without duplicates; masks: int32 [m, ceil(vocab_size / 32)], contiguous, one bit for
    each token, the first one the lowest.
    """
    grid = (len(indices), triton.cdiv(logits.shape[1], BLOCK))
    _keep_masked[grid](logits, indices, masks, logits.shape[1], masks.shape[1], logits.stride(0), BLOCK=BLOCK)


def forbid_bad_words(logits: Tensor, memory: Tensor, rows: Tensor, positions: Tensor) -> None:
    """Forbid the last token of each sequence whose other tokens were just generated. positions: int32 [n], of the next
    token."""
    _forbid_bad_words[(len(logits),)](logits, memory, rows, positions, logits.stride(0), BLOCK=_LIST_BLOCK)


def suppress(logits: Tensor, memory: Tensor, rows: Tensor, positions: Tensor) -> None:
    """Forbid the suppressed tokens before the position from which the row is free. positions: int32 [n]"""
    _suppress[(len(logits),)](logits, memory, rows, positions, logits.stride(0), BLOCK=_LIST_BLOCK)


def add_bias(logits: Tensor, memory: Tensor, rows: Tensor) -> None:
    """Add the bias of each token that has one."""
    _add_bias[(len(logits),)](logits, memory, rows, logits.stride(0), BLOCK=_LIST_BLOCK)


def penalise(logits: Tensor, memory: Tensor, rows: Tensor, counts: Tensor) -> None:
    """Apply the repetition penalty, then the frequency and presence penalties. counts: int32 [num_entries,
    vocab_size], see `IN_PROMPT`."""
    grid = (len(logits), triton.cdiv(logits.shape[1], BLOCK))
    # a product and a sum are rounded apart, as elsewhere
    _penalise[grid](
        logits, memory, rows, counts, logits.shape[1], logits.stride(0), BLOCK=BLOCK, enable_fp_fusion=False
    )


@triton.jit
def _keep_allowed(logits, memory, rows, vocab_size, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    start = tl.load(record_of(memory, rows, line) + ALLOWED)
    if start < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    bits = tl.load(memory + start + (ids >> 5), mask=is_token, other=0)
    is_forbidden = ((bits >> (ids & 31)) & 1) == 0
    tl.store(logits + line.to(tl.int64) * stride + ids, float("-inf"), mask=is_token & is_forbidden)


@triton.jit
def _keep_masked(logits, indices, masks, vocab_size, num_words, stride, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_token = ids < vocab_size
    bits = tl.load(masks + number.to(tl.int64) * num_words + (ids >> 5), mask=is_token, other=0)
    is_forbidden = ((bits >> (ids & 31)) & 1) == 0
    own = logits + tl.load(indices + number).to(tl.int64) * stride + ids
    tl.store(own, float("-inf"), mask=is_token & is_forbidden)


@triton.jit
def _forbid_bad_words(logits, memory, rows, positions, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    count = tl.load(record + NUM_BAD_WORDS)
    length = tl.load(record + PREFIX_LENGTH)
    ring = memory + tl.load(record + BAD_WORDS)
    position = tl.load(positions + line)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        is_sequence = index < count
        sequence = ring + length + index * (length + 1)
        matches = is_sequence
        for column in range(length):
            # column 0 of the prefix is as old as the ring's oldest token, at the place that the next token will take
            generated = tl.load(ring + (position + column) % length)
            expected = tl.load(sequence + column, mask=is_sequence, other=0)
            matches = matches & ((expected == ANY) | (expected == generated))
        last = tl.load(sequence + length, mask=is_sequence, other=0)
        tl.store(logits + line.to(tl.int64) * stride + last, float("-inf"), mask=matches)


@triton.jit
def _suppress(logits, memory, rows, positions, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    if tl.load(positions + line) >= tl.load(record + FREE_FROM):
        return
    token_ids = memory + tl.load(record + SUPPRESSED)
    count = tl.load(record + NUM_SUPPRESSED)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        ids = tl.load(token_ids + index, mask=index < count, other=0)
        tl.store(logits + line.to(tl.int64) * stride + ids, float("-inf"), mask=index < count)


@triton.jit
def _add_bias(logits, memory, rows, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    token_ids = memory + tl.load(record + BIAS)
    count = tl.load(record + NUM_BIASES)
    for begin in range(0, count, BLOCK):
        index = begin + tl.arange(0, BLOCK)
        is_biased = index < count
        own = logits + line.to(tl.int64) * stride + tl.load(token_ids + index, mask=is_biased, other=0)
        bias = tl.load(token_ids + count + index, mask=is_biased, other=0).to(tl.float32, bitcast=True)
        tl.store(own, tl.load(own, mask=is_biased, other=0.0) + bias, mask=is_biased)


@triton.jit
def _penalise(logits, memory, rows, counts, vocab_size, stride, BLOCK: tl.constexpr):
    line = tl.program_id(0)
    record = record_of(memory, rows, line)
    entry = tl.load(record + COUNTS)
    if entry < 0:
        return
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = logits + line.to(tl.int64) * stride + ids
    count = tl.load(counts + entry.to(tl.int64) * vocab_size + ids, mask=ids < vocab_size, other=0)
    values = tl.load(own, mask=count != 0, other=0.0)
    repetition = load_float(record, REPETITION)
    values = tl.where(values > 0, tl.div_rn(values, tl.zeros_like(values) + repetition), values * repetition)
    generated = (count & (PROMPT_BIT - 1)).to(tl.float32)
    is_generated = (generated > 0).to(tl.float32)
    values = values - load_float(record, FREQUENCY) * generated - load_float(record, PRESENCE) * is_generated
    tl.store(own, values, mask=count != 0)
