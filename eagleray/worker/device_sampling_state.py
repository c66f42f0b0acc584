"""Sampling parameters of each running request in the memory of a CUDA device.

Rows are added and freed on the host. Their changes are collected there and go to the device with the next step, as
words that the step's upload contains; a step in which no row was added has none. Records and lists lie in one vector of
int32 words, whose layout is that of `RecordField`; penalties have a table of token counts beside it. Owned by the
device sampler.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.cuda.sampling_record import (
    ANY_TOKEN,
    IN_PROMPT,
    NO_TOKEN,
    ONE,
    RECORD_WORDS,
    RecordField,
)
from eagleray.kernels.cuda.triton.sampling_records import SEGMENT_WORDS, apply_segments, write_counts
from eagleray.messages.sampling import Sampling
from eagleray.worker.random_sampler import stream_of
from eagleray.worker.sampling_state import GREEDY_BELOW, MAX_TEMPERATURE, SamplingFeature, features_of

Words = npt.NDArray[np.int32]

MAX_POSITION = 2**31 - 1
MIN_LIST_WORDS = 64
"""Least memory of a row that has lists; more is a power of two."""
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes since the last step, as part of an upload. Indices count words of the whole upload."""

    words: Words
    segments_at: int
    num_segments: int
    """Segments of the memory."""
    counts_at: int
    num_counts: int
    """Segments of the token counts."""
    new_entries: tuple[int, ...]
    """Rows of the token counts that a new request has."""


@dataclass(frozen=True, slots=True)
class _RowParameters:
    """Words of a row that the device does not have yet."""

    record: Words
    lists: Words
    lists_at: int
    counts: Words
    """Token ids, then their counts."""
    entry: int
    """Row of the token counts, -1 without penalties."""


class DeviceSamplingState:
    """The tensors are replaced by larger ones when rows need more room."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.use = np.zeros(num_rows, dtype=np.int64)
        """`SamplingFeature` flags; 0 for a greedy row without other features, and for a free one."""
        self.has_top_k = np.zeros(num_rows, dtype=np.bool_)
        self.has_top_p = np.zeros(num_rows, dtype=np.bool_)
        self.restricting_top_k = np.zeros(num_rows, dtype=np.int64)
        """top_k, or 0 if it drops no token of the row."""
        self.drops_by_weight = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row has top_p or min_p, and is not greedy."""
        self.num_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.num_reported = np.zeros(num_rows, dtype=np.int64)
        """Number of ids in `logprob_token_ids`."""
        self.memory = torch.zeros(num_rows * RECORD_WORDS, dtype=torch.int32, device=device)
        self.counts = torch.zeros((0, vocab_size), dtype=torch.int32, device=device)
        """int32 [num_entries, vocab_size], see `IN_PROMPT`. Entries are made when first needed, and reused."""
        self._lists = _ListMemory(start=num_rows * RECORD_WORDS)
        self._list_of_row: dict[int, tuple[int, int]] = {}
        self._entry_of_row: dict[int, int] = {}
        self._free_entries: list[int] = []
        self._num_entries = 0
        self._new: dict[int, _RowParameters] = {}

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Set the row's parameters. `token_ids` is the prompt, then the tokens that were generated before."""
        self.free_row(row)
        use = features_of(sampling)
        is_random = bool(use & SamplingFeature.RANDOM)
        self.use[row] = use
        self.has_top_k[row] = is_random and 0 < sampling.top_k < self.vocab_size
        self.has_top_p[row] = is_random and sampling.top_p < 1
        is_greedy = sampling.temperature < GREEDY_BELOW
        restricts = 0 < sampling.top_k < self.vocab_size and not is_greedy
        self.restricting_top_k[row] = sampling.top_k if restricts else 0
        self.drops_by_weight[row] = (sampling.top_p < 1 or sampling.min_p > 0) and not is_greedy
        self.num_logprobs[row] = sampling.logprobs or 0
        self.num_reported[row] = len(sampling.logprob_token_ids)
        lists = _lists_of(sampling, use, self.vocab_size, token_ids, num_prompt_tokens)
        start = self._allocate(row, lists.num_words)
        record = _record_of(sampling, use, self.vocab_size, num_prompt_tokens)
        for at, offset in lists.offsets.items():
            record[at] = start + offset
        for at, count in lists.counts.items():
            record[at] = count
        entry, counts = -1, np.empty(0, dtype=np.int32)
        if use & SamplingFeature.PENALTIES:
            entry = self._allocate_entry(row)
            counts = _token_counts(sampling, token_ids, num_prompt_tokens)
        record[RecordField.COUNTS] = entry
        self._new[row] = _RowParameters(record, lists.words, start, counts, entry)

    def free_row(self, row: int) -> None:
        """Free the row's memory. Does nothing for a free row."""
        self.use[row] = 0
        self._new.pop(row, None)
        if row in self._list_of_row:
            self._lists.free(*self._list_of_row.pop(row))
        if row in self._entry_of_row:
            self._free_entries.append(self._entry_of_row.pop(row))

    def pop_changes(self, start: int) -> RowChanges:
        """Return the changes since the last call, for an upload in which they begin at word `start`."""
        segments: list[tuple[int, int, int]] = []
        counts: list[tuple[int, int, int]] = []
        payload: list[Words] = []
        num_counted = sum(parameters.entry >= 0 for parameters in self._new.values())
        num_segments = sum(1 + (len(parameters.lists) > 0) for parameters in self._new.values())
        end = start + SEGMENT_WORDS * (num_segments + num_counted)
        for row, parameters in self._new.items():
            parts = [(segments, row * RECORD_WORDS, parameters.record)]
            if len(parameters.lists):
                parts.append((segments, parameters.lists_at, parameters.lists))
            if parameters.entry >= 0:
                parts.append((counts, parameters.entry, parameters.counts))
            for descriptions, target, words in parts:
                descriptions.append((target, end, len(words)))
                payload.append(words)
                end += len(words)
        new_entries = tuple(parameters.entry for parameters in self._new.values() if parameters.entry >= 0)
        self._new = {}
        return RowChanges(
            words=np.concatenate([np.array([*segments, *counts], dtype=np.int32).reshape(-1), *payload]),
            segments_at=start,
            num_segments=num_segments,
            counts_at=start + SEGMENT_WORDS * num_segments,
            num_counts=num_counted,
            new_entries=new_entries,
        )

    def apply(self, changes: RowChanges, words: Tensor) -> None:
        """Launch the changes on the device. words: int32, the upload that contains them."""
        if not changes.num_segments:
            return
        self._grow()
        apply_segments(self.memory, words, changes.segments_at, changes.num_segments)
        if changes.num_counts:
            for entry in changes.new_entries:
                self.counts[entry].zero_()
            write_counts(self.counts, words, changes.counts_at, changes.num_counts)

    def _grow(self) -> None:
        """Copy the tensors into larger ones if rows have been given more room than they have."""
        if self._lists.end > len(self.memory):
            larger = self.memory.new_zeros(max(self._lists.end, 2 * len(self.memory)))
            larger[: len(self.memory)] = self.memory
            self.memory = larger
        if self._num_entries > len(self.counts):
            missing = self._num_entries - len(self.counts)
            self.counts = torch.cat([self.counts, self.counts.new_zeros((missing, self.vocab_size))])

    def _allocate(self, row: int, num_words: int) -> int:
        if not num_words:
            return 0
        self._list_of_row[row] = self._lists.allocate(num_words), num_words
        return self._list_of_row[row][0]

    def _allocate_entry(self, row: int) -> int:
        if not self._free_entries:
            more = max(self._num_entries, 1)
            self._free_entries.extend(range(self._num_entries + more - 1, self._num_entries - 1, -1))
            self._num_entries += more
        self._entry_of_row[row] = self._free_entries.pop()
        return self._entry_of_row[row]


class _ListMemory:
    """Indices of the memory that rows may use for their lists. Sizes are powers of two; freed ones are reused."""

    def __init__(self, *, start: int) -> None:
        self.end = start
        """Index behind the last word that was ever allocated."""
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size

    def allocate(self, num_words: int) -> int:
        size = _size_of(num_words)
        if self._free[size]:
            return self._free[size].pop()
        self.end += size
        return self.end - size

    def free(self, start: int, num_words: int) -> None:
        self._free[_size_of(num_words)].append(start)


def _size_of(num_words: int) -> int:
    size = MIN_LIST_WORDS
    while size < num_words:
        size *= 2
    return size


@dataclass(slots=True)
class _RowLists:
    """Lists of a row, one behind the other."""

    parts: list[Words] = field(default_factory=list)
    offsets: dict[RecordField, int] = field(default_factory=dict)
    """Index of each list in the words of all."""
    counts: dict[RecordField, int] = field(default_factory=dict)
    num_words: int = 0

    @property
    def words(self) -> Words:
        return np.concatenate([np.empty(0, dtype=np.int32), *self.parts])

    def add(self, at: RecordField, *parts: Any) -> None:
        """Append a list whose record field is `at`."""
        self.offsets[at] = self.num_words
        for part in parts:
            self.parts.append(np.asarray(part, dtype=np.int32).reshape(-1))
            self.num_words += len(self.parts[-1])


def _lists_of(
    sampling: Sampling, use: int, vocab_size: int, token_ids: Sequence[int], num_prompt_tokens: int
) -> _RowLists:
    lists = _RowLists()
    if use & SamplingFeature.ALLOWED:
        lists.add(RecordField.ALLOWED, _bits(sampling.allowed_token_ids, vocab_size))
    if use & SamplingFeature.MIN_TOKENS:
        lists.add(RecordField.SUPPRESSED, sampling.suppressed_token_ids)
        lists.counts[RecordField.NUM_SUPPRESSED] = len(sampling.suppressed_token_ids)
    if use & SamplingFeature.BIAS:
        bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        lists.add(RecordField.BIAS, list(sampling.logit_bias), bias.view(np.int32))
        lists.counts[RecordField.NUM_BIASES] = len(bias)
    if use & SamplingFeature.LOGPROBS and sampling.logprob_token_ids:
        lists.add(RecordField.REPORTED, sampling.logprob_token_ids)
        lists.counts[RecordField.NUM_REPORTED] = len(sampling.logprob_token_ids)
    if use & SamplingFeature.FORCED:
        lists.add(RecordField.FORCED, sampling.forced_token_ids)
        lists.counts[RecordField.NUM_FORCED] = len(sampling.forced_token_ids)
    sequences = [sequence for sequence in sampling.bad_words if sequence]
    if sequences:
        length = max(map(len, sequences)) - 1
        aligned = [(ANY_TOKEN,) * (length + 1 - len(sequence)) + sequence for sequence in sequences]
        lists.add(RecordField.BAD_WORDS, _ring(token_ids, num_prompt_tokens, length), aligned)
        lists.counts[RecordField.NUM_BAD_WORDS] = len(sequences)
        lists.counts[RecordField.PREFIX_LENGTH] = length
    return lists


def _record_of(sampling: Sampling, use: int, vocab_size: int, num_prompt_tokens: int) -> Words:
    """Return the record of a row without lists and penalties' entry."""
    record = np.zeros(RECORD_WORDS, dtype=np.int32)
    record[RecordField.ALLOWED] = -1
    scale, top_k, top_p, min_p = np.float32(1), vocab_size, 1.0, 0.0  # as for a greedy row
    if sampling.temperature >= GREEDY_BELOW:
        scale = np.float32(min(sampling.temperature, MAX_TEMPERATURE))
        top_k = min(sampling.top_k, vocab_size) if sampling.top_k > 0 else vocab_size
        top_p, min_p = sampling.top_p, sampling.min_p
    if use & SamplingFeature.RANDOM:
        _put(record, RecordField.TEMPERATURE, scale)
    _put(record, RecordField.SCALE, scale)
    record[RecordField.TOP_K] = top_k
    _put(record, RecordField.MIN_WEIGHT, np.int64(np.ceil(min_p * ONE)))
    _put(record, RecordField.TOP_P, np.float64(top_p))
    _put(record, RecordField.STREAM, stream_of(sampling.seed))
    _put(record, RecordField.REPETITION, np.float32(sampling.repetition_penalty))
    _put(record, RecordField.FREQUENCY, np.float32(sampling.frequency_penalty))
    _put(record, RecordField.PRESENCE, np.float32(sampling.presence_penalty))
    record[RecordField.FORCED_FROM] = num_prompt_tokens
    if use & SamplingFeature.MIN_TOKENS:
        record[RecordField.FREE_FROM] = min(num_prompt_tokens + sampling.min_tokens, MAX_POSITION)
    return record


def _put(record: Words, at: RecordField, value: np.generic) -> None:
    """Write the bits of a number of 32 or 64 bits."""
    words = np.atleast_1d(np.asarray(value)).view(np.int32)
    record[at : at + len(words)] = words


def _bits(token_ids: Sequence[int], vocab_size: int) -> Words:
    """Return a bit for each token of the vocabulary: 1 for the given ones."""
    words = np.zeros(-(-vocab_size // WORD_BITS), dtype=np.uint32)
    ids = np.array(token_ids, dtype=np.int64)
    np.bitwise_or.at(words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return words.view(np.int32)


def _ring(token_ids: Sequence[int], num_prompt_tokens: int, length: int) -> Words:
    """Return the last `length` generated tokens, each at its position modulo the length."""
    ring = np.full(length, NO_TOKEN, dtype=np.int32)
    for position in range(max(num_prompt_tokens, len(token_ids) - length), len(token_ids)):
        ring[position % length] = token_ids[position]
    return ring


def _token_counts(sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> Words:
    """Return the tokens that a penalty touches, then their counts."""
    tokens = np.array(token_ids, dtype=np.int64)
    generated, counts = np.unique(tokens[num_prompt_tokens:], return_counts=True)
    prompt = np.unique(tokens[:num_prompt_tokens]) if sampling.repetition_penalty != 1 else tokens[:0]
    touched = np.union1d(generated, prompt)
    values = np.zeros(len(touched), dtype=np.int64)
    values[np.searchsorted(touched, generated)] = counts
    values[np.searchsorted(touched, prompt)] |= IN_PROMPT
    return np.concatenate([touched, values]).astype(np.int32)
