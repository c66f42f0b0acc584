"""How each running request chooses its tokens: its parameters, and what the choice needs to remember.

Indexed by row, like `rows`. Owned by the runner, which starts and ends rows and reports the tokens that were sampled;
read by the sampler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import torch

from eagleray.messages.sampling import Sampling
from eagleray.worker.bad_words import BadWords
from eagleray.worker.penalties import Penalties
from eagleray.worker.token_table import IntArray, TokenTable
from eagleray.worker.uniform import stream_of

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: nothing but equal logits would be left to draw from."""
MAX_TEMPERATURE = 1e30
"""Finite in float32, and flat for any logits."""


class SamplingFeature(enum.IntFlag):
    """What a row uses. A step does only what one of its rows uses."""

    RANDOM = enum.auto()
    ALLOWED = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    BIAS = enum.auto()
    PENALTIES = enum.auto()
    LOGPROBS = enum.auto()
    ADJUSTED = ALLOWED | BAD_WORDS | MIN_TOKENS | BIAS | PENALTIES
    """Whatever changes logits."""


class SamplingState:
    """Parameters in numpy arrays [num_rows]; token lists and penalty counts in tables of those rows that have them."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.use = np.zeros(num_rows, dtype=np.int64)
        """`SamplingFeature` flags; 0 for a greedy row without anything, and for a free one."""
        self.streams = np.zeros(num_rows, dtype=np.uint64)
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        """`vocab_size` for all."""
        self.top_p = np.ones(num_rows, dtype=np.float64)
        self.min_p = np.zeros(num_rows, dtype=np.float64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.allowed = TokenTable()
        self.suppressed = TokenTable()
        self.bias = TokenTable()
        self.reported = TokenTable()
        """The ids of `logprob_token_ids`."""
        self.bad_words = BadWords(num_rows)
        self.penalties = Penalties(num_rows=num_rows, vocab_size=vocab_size, device=device)

    def start(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """A request takes the row. `token_ids`: its prompt, then what it has generated before."""
        self.end(row)
        use = _use(sampling)
        self.use[row] = use
        self.streams[row] = stream_of(sampling.seed)
        self.temperature[row] = min(sampling.temperature, MAX_TEMPERATURE)
        self.top_k[row] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = sampling.logprobs or 0
        if use & SamplingFeature.ALLOWED:
            self.allowed.put(row, sampling.allowed_token_ids)
        if use & SamplingFeature.MIN_TOKENS:
            self.suppressed.put(row, sampling.suppressed_token_ids)
        if use & SamplingFeature.BIAS:
            self.bias.put(row, list(sampling.logit_bias), list(sampling.logit_bias.values()))
        if use & SamplingFeature.LOGPROBS:
            self.reported.put(row, sampling.logprob_token_ids)
        if use & SamplingFeature.BAD_WORDS:
            self.bad_words.start(row, sampling.bad_words, token_ids[num_prompt_tokens:])
        if use & SamplingFeature.PENALTIES:
            self.penalties.start(row, sampling, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])

    def end(self, row: int) -> None:
        """The row is free. To end a free row does nothing."""
        if not self.use[row]:
            return
        self.use[row] = 0
        for table in (self.allowed, self.suppressed, self.bias, self.reported):
            table.discard(row)
        self.bad_words.end(row)
        self.penalties.end(row)

    def append(self, rows: Sequence[int] | IntArray, token_ids: Sequence[int] | IntArray) -> None:
        """Each of `rows` generated one more token. Shapes [n], rows without duplicates."""
        row_ids, tokens = np.asarray(rows, dtype=np.int64), np.asarray(token_ids, dtype=np.int64)
        use = self.use[row_ids]
        used = int(np.bitwise_or.reduce(use))
        if used & SamplingFeature.BAD_WORDS:
            those = (use & SamplingFeature.BAD_WORDS) != 0
            self.bad_words.append(row_ids[those], tokens[those])
        if used & SamplingFeature.PENALTIES:
            those = (use & SamplingFeature.PENALTIES) != 0
            self.penalties.append(row_ids[those], tokens[those])

    def line_of(self, rows: IntArray) -> IntArray:
        """[num_rows] the place of each row in `rows`, -1 for the others."""
        lines = np.full(len(self.use), -1, dtype=np.int64)
        lines[rows] = np.arange(len(rows))
        return lines


def _use(sampling: Sampling) -> SamplingFeature:
    # top_k of 1 keeps what a greedy row chooses
    is_random = sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1
    is_penalised = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)
    uses = {
        SamplingFeature.RANDOM: is_random,
        SamplingFeature.ALLOWED: bool(sampling.allowed_token_ids),
        SamplingFeature.BAD_WORDS: bool(sampling.bad_words),
        SamplingFeature.MIN_TOKENS: sampling.min_tokens > 0 and bool(sampling.suppressed_token_ids),
        SamplingFeature.BIAS: bool(sampling.logit_bias),
        SamplingFeature.PENALTIES: is_penalised,
        SamplingFeature.LOGPROBS: sampling.logprobs is not None or bool(sampling.logprob_token_ids),
    }
    return SamplingFeature(sum(use for use, is_used in uses.items() if is_used))
