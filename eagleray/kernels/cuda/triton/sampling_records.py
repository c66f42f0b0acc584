"""Access of Triton kernels to the sampling records of rows, and the kernel that changes them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from eagleray.kernels.cuda.sampling_record import ANY_TOKEN, IN_PROMPT, ONE, RECORD_WORDS, RecordField

SEGMENT_WORDS = 3
"""Words that describe a segment of an upload: index in the memory, index in the upload, number of words."""
_BLOCK = 256

# A kernel reads no other globals than these.
RECORD_SIZE = tl.constexpr(RECORD_WORDS)
TEMPERATURE = tl.constexpr(int(RecordField.TEMPERATURE))
TOP_K = tl.constexpr(int(RecordField.TOP_K))
MIN_WEIGHT = tl.constexpr(int(RecordField.MIN_WEIGHT))
TOP_P = tl.constexpr(int(RecordField.TOP_P))
STREAM = tl.constexpr(int(RecordField.STREAM))
REPETITION = tl.constexpr(int(RecordField.REPETITION))
FREQUENCY = tl.constexpr(int(RecordField.FREQUENCY))
PRESENCE = tl.constexpr(int(RecordField.PRESENCE))
COUNTS = tl.constexpr(int(RecordField.COUNTS))
ALLOWED = tl.constexpr(int(RecordField.ALLOWED))
SUPPRESSED = tl.constexpr(int(RecordField.SUPPRESSED))
NUM_SUPPRESSED = tl.constexpr(int(RecordField.NUM_SUPPRESSED))
FREE_FROM = tl.constexpr(int(RecordField.FREE_FROM))
BIAS = tl.constexpr(int(RecordField.BIAS))
NUM_BIASES = tl.constexpr(int(RecordField.NUM_BIASES))
BAD_WORDS = tl.constexpr(int(RecordField.BAD_WORDS))
NUM_BAD_WORDS = tl.constexpr(int(RecordField.NUM_BAD_WORDS))
PREFIX_LENGTH = tl.constexpr(int(RecordField.PREFIX_LENGTH))
REPORTED = tl.constexpr(int(RecordField.REPORTED))
NUM_REPORTED = tl.constexpr(int(RecordField.NUM_REPORTED))
FORCED = tl.constexpr(int(RecordField.FORCED))
NUM_FORCED = tl.constexpr(int(RecordField.NUM_FORCED))
FORCED_FROM = tl.constexpr(int(RecordField.FORCED_FROM))
ANY = tl.constexpr(ANY_TOKEN)
PROMPT_BIT = tl.constexpr(IN_PROMPT)
WEIGHT_OF_ONE = tl.constexpr(ONE)


def apply_segments(memory: Tensor, words: Tensor, start: int, num_segments: int) -> None:
    """Copy segments of an upload into the memory.

    memory, words: int32, flat. The segments' descriptions, `SEGMENT_WORDS` each, begin at `words[start]`.
    """
    _copy_segments[(num_segments,)](memory, words, start, SIZE=SEGMENT_WORDS, BLOCK=_BLOCK)


def write_counts(counts: Tensor, words: Tensor, start: int, num_segments: int) -> None:
    """Write the counts of tokens of rows with penalties. The other tokens of these rows must be 0 already.

    counts: int32 [num_entries, vocab_size]; words: int32, flat. A segment's first number is a row of `counts`; its
    words are the token ids, then as many counts.
    """
    _write_counts[(num_segments,)](counts, words, start, counts.shape[1], SIZE=SEGMENT_WORDS, BLOCK=_BLOCK)


def collect_reported(memory: Tensor, rows: Tensor, indices: Tensor, chosen: Tensor, *, out: Tensor) -> None:
    """Write the tokens whose log-probabilities are reported: the chosen one, then those that the row asked for, padded
    with the chosen one.

    rows: int32 [n]; indices: int32 [num_reported], into `rows`; chosen: int32 [num_reported]; out: int64
    [num_reported, at least 1 + the most that a row asked for].
    """
    if len(out):
        _collect_reported[(len(out),)](memory, rows, indices, chosen, out, out.shape[1], BLOCK=_BLOCK)


@triton.jit
def record_of(memory, rows, line):
    return memory + tl.load(rows + line).to(tl.int64) * RECORD_SIZE


@triton.jit
def load_float(record, FIELD: tl.constexpr):
    return tl.load(record + FIELD).to(tl.float32, bitcast=True)


@triton.jit
def load_long(record, FIELD: tl.constexpr):
    """Return a number of two words as uint64."""
    low = tl.load(record + FIELD).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(record + FIELD + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
    return (high << 32) | low


# Numbers that differ from step to step do not make another version of a kernel.
@triton.jit(do_not_specialize=["start"])
def _copy_segments(memory, words, start, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    segment = words + start + tl.program_id(0) * SIZE
    target, source, count = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(memory + target + at, tl.load(words + source + at, mask=at < count), mask=at < count)


@triton.jit(do_not_specialize=["start"])
def _write_counts(counts, words, start, vocab_size, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    segment = words + start + tl.program_id(0) * SIZE
    entry, source, count = tl.load(segment), tl.load(segment + 1), tl.load(segment + 2)
    num_tokens = count // 2
    own = counts + entry.to(tl.int64) * vocab_size
    for begin in range(0, num_tokens, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        is_token = at < num_tokens
        token_ids = tl.load(words + source + at, mask=is_token)
        tl.store(own + token_ids, tl.load(words + source + num_tokens + at, mask=is_token), mask=is_token)


@triton.jit(do_not_specialize=["width"])
def _collect_reported(memory, rows, indices, chosen, out, width, BLOCK: tl.constexpr):
    report = tl.program_id(0)
    record = record_of(memory, rows, tl.load(indices + report))
    token = tl.load(chosen + report)
    own = memory + tl.load(record + REPORTED)
    num_own = tl.load(record + NUM_REPORTED)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_own = (column > 0) & (column <= num_own)
        token_ids = tl.where(is_own, tl.load(own + column - 1, mask=is_own, other=0), token)
        tl.store(out + report.to(tl.int64) * width + column, token_ids.to(tl.int64), mask=column < width)
