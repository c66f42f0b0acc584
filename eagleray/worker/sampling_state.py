"""Sampling parameters of each running request, and the memory that its choice of tokens needs.

Indexed by row, like `InputBatch`. Owned by the runner, which adds and frees rows and appends the tokens that were
sampled; read by the sampler.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from eagleray.messages.sampling import Sampling
from eagleray.worker.bad_words import BadWords
from eagleray.worker.penalties import Penalties
from eagleray.worker.random_sampler import DrawSettings, stream_of
from eagleray.worker.token_table import IntArray, TokenTable

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: only equal logits would be left to draw from."""
MAX_TEMPERATURE = 1e30
"""Finite in float32, and flat for any logits."""


class SamplingFeature(enum.IntEnum):
    """Flags of features that a row uses. A step does only the work for features that one of its rows uses.

    These are integers, because an operation of `IntFlag` takes more than a microsecond.
    """

    RANDOM = 1 << 0
    ALLOWED = 1 << 1
    BAD_WORDS = 1 << 2
    MIN_TOKENS = 1 << 3
    BIAS = 1 << 4
    PENALTIES = 1 << 5
    LOGPROBS = 1 << 6
    FORCED = 1 << 7
    GRAMMAR = 1 << 8
    BY_PARAMETERS = ALLOWED | BAD_WORDS | MIN_TOKENS | BIAS | PENALTIES
    """Features that change logits by what the sampling parameters say alone."""
    ADJUSTED = BY_PARAMETERS | GRAMMAR
    """All features that change logits."""


class SamplingState:
    """Parameters in numpy arrays [num_rows]; token lists and penalty counts in tables of the rows that have them."""

    def __init__(self, *, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.device = device
        self.use = np.zeros(num_rows, dtype=np.int64)
        """`SamplingFeature` flags; 0 for a greedy row without other features, and for a free one."""
        self.streams = np.zeros(num_rows, dtype=np.uint64)
        """Random stream of each row that is not greedy."""
        self.temperature = np.ones(num_rows, dtype=np.float32)
        self.top_k = np.zeros(num_rows, dtype=np.int64)
        """`vocab_size` if top_k does not restrict the row."""
        self.top_p = np.ones(num_rows, dtype=np.float64)
        self.min_p = np.zeros(num_rows, dtype=np.float64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.min_tokens = np.zeros(num_rows, dtype=np.int64)
        self.num_logprobs = np.zeros(num_rows, dtype=np.int64)
        self.allowed = TokenTable()
        self.suppressed = TokenTable()
        self.bias = TokenTable()
        self.reported = TokenTable()
        """Token ids of `logprob_token_ids`."""
        self.forced: dict[int, IntArray] = {}
        """Token ids that are generated whatever is drawn, by row."""
        self.bad_words = BadWords(num_rows)
        self.penalties = Penalties(num_rows=num_rows, vocab_size=vocab_size, device=device)
        self._rows_with_history: set[int] = set()
        """Rows for which generated tokens are remembered."""

    def add_row(self, row: int, sampling: Sampling, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Set the row's parameters. `token_ids` is the prompt, then the tokens that were generated before."""
        self.free_row(row)
        use = features_of(sampling)
        self.use[row] = use
        self.temperature[row] = min(sampling.temperature, MAX_TEMPERATURE)
        self.top_k[row] = min(sampling.top_k, self.vocab_size) if sampling.top_k > 0 else self.vocab_size
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.num_prompt_tokens[row] = num_prompt_tokens
        self.min_tokens[row] = sampling.min_tokens
        self.num_logprobs[row] = sampling.logprobs or 0
        if use & SamplingFeature.RANDOM:
            self.streams[row] = stream_of(sampling.seed)
        if use & SamplingFeature.ALLOWED:
            self.allowed.put(row, sampling.allowed_token_ids)
        if use & SamplingFeature.MIN_TOKENS:
            self.suppressed.put(row, sampling.suppressed_token_ids)
        if use & SamplingFeature.BIAS:
            self.bias.put(row, list(sampling.logit_bias), list(sampling.logit_bias.values()))
        if use & SamplingFeature.LOGPROBS:
            self.reported.put(row, sampling.logprob_token_ids)
        if use & SamplingFeature.FORCED:
            self.forced[row] = np.array(sampling.forced_token_ids, dtype=np.int64)
        if use & SamplingFeature.BAD_WORDS:
            self.bad_words.add_row(row, sampling.bad_words, token_ids[num_prompt_tokens:])
        if use & (SamplingFeature.BAD_WORDS | SamplingFeature.PENALTIES):
            self._rows_with_history.add(row)
        if use & SamplingFeature.PENALTIES:
            self.penalties.add_row(row, sampling, token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:])

    def free_row(self, row: int) -> None:
        """Free the row and drop its tables' entries. Does nothing for a free row."""
        use = int(self.use[row])
        if not use:
            return
        self.use[row] = 0
        self._rows_with_history.discard(row)
        if use & SamplingFeature.ALLOWED:
            self.allowed.discard(row)
        if use & SamplingFeature.MIN_TOKENS:
            self.suppressed.discard(row)
        if use & SamplingFeature.BIAS:
            self.bias.discard(row)
        if use & SamplingFeature.LOGPROBS:
            self.reported.discard(row)
        if use & SamplingFeature.FORCED:
            del self.forced[row]
        if use & SamplingFeature.BAD_WORDS:
            self.bad_words.free_row(row)
        if use & SamplingFeature.PENALTIES:
            self.penalties.free_row(row)

    def forced_tokens(self, rows: IntArray, positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the indices into `rows` [n] of those that force a token at their position [n], and these tokens."""
        forced = {
            index: int(token_ids[number])
            for index, row in enumerate(rows.tolist())
            if (token_ids := self.forced.get(row)) is not None
            and (number := int(positions[index] - self.num_prompt_tokens[row])) < len(token_ids)
        }
        return np.array(list(forced), dtype=np.int64), np.array(list(forced.values()), dtype=np.int64)

    def draw_settings(self, rows: IntArray, uniforms: npt.NDArray[np.float64]) -> DrawSettings:
        """Return the parameters of draws for `rows` [n], none of them greedy, with these uniform numbers."""
        return DrawSettings(uniforms, self.temperature[rows], self.min_p[rows], self.top_k[rows], self.top_p[rows])

    def process_settings(self, rows: IntArray) -> DrawSettings:
        """Return the parameters by which the logits of `rows` [n] are processed. A greedy row has a temperature of 1
        and drops nothing."""
        is_greedy = self.temperature[rows] < GREEDY_BELOW
        return DrawSettings(
            np.zeros(len(rows)),
            np.where(is_greedy, np.float32(1), self.temperature[rows]),
            np.where(is_greedy, 0.0, self.min_p[rows]),
            np.where(is_greedy, self.vocab_size, self.top_k[rows]),
            np.where(is_greedy, 1.0, self.top_p[rows]),
        )

    def append_tokens(self, rows: Sequence[int] | IntArray, token_ids: Sequence[int] | IntArray) -> None:
        """Append one generated token to each of `rows`. Shapes [n], rows without duplicates."""
        if not self._rows_with_history:
            return
        row_ids, tokens = np.asarray(rows, dtype=np.int64), np.asarray(token_ids, dtype=np.int64)
        use = self.use[row_ids]
        used = int(np.bitwise_or.reduce(use))
        if used & SamplingFeature.BAD_WORDS:
            selected = (use & SamplingFeature.BAD_WORDS) != 0
            self.bad_words.append_tokens(row_ids[selected], tokens[selected])
        if used & SamplingFeature.PENALTIES:
            selected = (use & SamplingFeature.PENALTIES) != 0
            self.penalties.append_tokens(row_ids[selected], tokens[selected])

    def logit_index_of_row(self, rows: IntArray) -> IntArray:
        """Return the index of each row in `rows`, -1 for rows that are not in it: [num_rows]."""
        indices = np.full(len(self.use), -1, dtype=np.int64)
        indices[rows] = np.arange(len(rows))
        return indices


def features_of(sampling: Sampling) -> int:
    """Return the `SamplingFeature` flags of these parameters."""
    # top_k of 1 keeps the token that a greedy row chooses
    is_random = sampling.temperature >= GREEDY_BELOW and sampling.top_k != 1
    is_penalised = bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1)
    uses = {
        SamplingFeature.RANDOM: is_random,
        SamplingFeature.ALLOWED: bool(sampling.allowed_token_ids),
        SamplingFeature.BAD_WORDS: bool(sampling.bad_words),
        SamplingFeature.MIN_TOKENS: sampling.min_tokens > 0 and bool(sampling.suppressed_token_ids),
        SamplingFeature.BIAS: bool(sampling.logit_bias),
        SamplingFeature.PENALTIES: is_penalised,
        SamplingFeature.LOGPROBS: sampling.wants_logprobs,
        SamplingFeature.FORCED: bool(sampling.forced_token_ids),
        SamplingFeature.GRAMMAR: sampling.is_masked,
    }
    return int(sum(use for use, is_used in uses.items() if is_used))
