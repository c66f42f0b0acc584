"""Numbers that are reported of tokens: log-probabilities or logits, raw or after the sampling parameters.

Raw ones are those of the model's own distribution. Processed ones are those of the distribution that a token is drawn
from: a token that top_k, top_p or min_p drops has minus infinity.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from eagleray.config.sections import LogprobsMode
from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.worker.token_table import Entries, IntArray

PROMPT_CHUNK_SIZE = 256
"""Prompt positions scored at once: 256 x 151,936 float32 logits are 156 MB."""

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**23}
"""Logits processed at once, which bounds the memory."""


@dataclass(frozen=True, slots=True)
class ScoreKind:
    """Kind of the reported numbers."""

    is_processed: bool = False
    """Whether the numbers of generated tokens are those after the sampling parameters."""
    is_logits: bool = False
    """Whether the numbers are logits, and not log-probabilities."""

    @classmethod
    def of(cls, mode: LogprobsMode) -> ScoreKind:
        """Return the kind that the option `logprobs_mode` asks for."""
        return cls(is_processed=mode.startswith("processed"), is_logits=mode.endswith("logits"))


RAW_LOGPROBS = ScoreKind()


def score_prompt(
    logits: Tensor, given: Tensor, k: int, ranking: Ranking, *, is_logits: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids int32 [n, k + g], their log-probabilities or logits [n, k + g], always raw ones, and ranks int32
    [n] for positions of a prompt: the prompt's own token, the `k` likeliest, then the other given ones.

    logits: float32 [n, vocab_size], of the positions before them; given: int64 [n, g], the prompt's tokens first.
    """
    token_ids, logprobs, ranks = score_tokens(logits, given, k, ranking, is_logits=is_logits)
    return token_ids.to(torch.int32), logprobs, ranks.to(torch.int32)


def sample_logprobs(
    logits: Tensor,
    chosen: Tensor,
    num_top: Sequence[int],
    requested: Entries,
    ranking: Ranking,
    *,
    processed: Tensor | None = None,
    is_logits: bool = False,
) -> list[TokenLogprobs]:
    """Return the report for each of the logits [n, vocab_size].

    chosen: int64 [n], the sampled tokens; num_top: [n], how many of the likeliest to report; requested: the token ids
    that were requested by name, owned by logit indices. For the others see `score_tokens`.
    """
    num_requested = np.bincount(requested.owners, minlength=len(chosen))
    k = min(max(num_top), logits.shape[1])
    given = _given(chosen, requested, num_requested)
    scores = score_tokens(logits, given, k, ranking, processed=processed, is_logits=is_logits)
    token_ids, logprobs, ranks = (tensor.tolist() for tensor in scores)
    return make_reports(token_ids, logprobs, ranks, num_top, num_requested.tolist(), k)


def make_reports(
    token_ids: list[list[int]],
    logprobs: list[list[float]],
    ranks: list[int],
    num_top: Sequence[int],
    num_requested: Sequence[int],
    k: int,
) -> list[TokenLogprobs]:
    """Return the report of each row of what `score_tokens` returned for `k`.

    num_top, num_requested: [n], how many of the likeliest and of the other given tokens the row asked for.
    """
    columns = [
        (slice(1 + min(top, k)), slice(1 + k, 1 + k + extra)) for top, extra in zip(num_top, num_requested, strict=True)
    ]
    return [
        TokenLogprobs(ids[front] + ids[back], values[front] + values[back], rank)
        for ids, values, rank, (front, back) in zip(token_ids, logprobs, ranks, columns, strict=True)
    ]


def _given(chosen: Tensor, requested: Entries, num_requested: IntArray) -> Tensor:
    """Return the chosen token, then the requested ones, padded with the chosen one: [n, 1 + most requested]."""
    given = chosen[:, None].repeat(1, 1 + int(num_requested.max()))
    order = np.argsort(requested.owners, kind="stable")
    owners = requested.owners[order]
    columns = 1 + np.arange(len(owners)) - (np.cumsum(num_requested) - num_requested)[owners]
    at, column, token_ids = map(torch.from_numpy, (owners, columns, requested.token_ids[order]))
    given[at.to(given.device), column.to(given.device)] = token_ids.to(given.device)
    return given


def score_tokens(
    logits: Tensor,
    given: Tensor,
    k: int,
    ranking: Ranking,
    *,
    processed: Tensor | None = None,
    is_logits: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids [n, k + g], their scores, and the ranks [n] of the first given ids, for ids [n, g].

    Columns: the first given token, the k likeliest, the other given ones. The scores are those of `processed` [n,
    vocab_size], or of the logits themselves: log-probabilities, or with `is_logits` the values. A rank is 1 plus the
    number of tokens with a higher score. The likeliest are in the order of the logits, so tokens that `processed` drops
    come behind the others.
    """
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    values = logits if processed is None else processed
    parts = zip(logits.split(size), values.split(size), given.split(size), strict=True)
    chunks = [_score_chunk(*part, k, ranking, is_logits) for part in parts]
    token_ids, scores, ranks = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    return token_ids, scores, ranks


def _score_chunk(
    logits: Tensor, values: Tensor, given: Tensor, k: int, ranking: Ranking, is_logits: bool
) -> tuple[Tensor, Tensor, Tensor]:
    token_ids = torch.cat([given[:, :1], ranking.top(logits, k), given[:, 1:]], dim=1)
    scores = values if is_logits else torch.log_softmax(values, dim=-1)
    ranks = 1 + (values > values.gather(1, given[:, :1])).sum(dim=1)
    return token_ids, scores.gather(1, token_ids), ranks
