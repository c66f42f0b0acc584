"""Log-probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.ranking import Ranking
from eagleray.messages.outputs import TokenLogprobs
from eagleray.worker.token_table import Entries, IntArray

CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**23}
"""Logits processed at once, which bounds the memory."""


def score_prompt(logits: Tensor, next_token_ids: Tensor, k: int, ranking: Ranking) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids int32 [n, 1 + k], their log-probabilities [n, 1 + k] and ranks int32 [n] for positions of a
    prompt: the prompt's own token, then the `k` likeliest.

    logits: float32 [n, vocab_size], of the positions before them; next_token_ids: int64 [n], the prompt's tokens.
    """
    token_ids, logprobs, ranks = score_tokens(logits, next_token_ids[:, None], k, ranking)
    return token_ids.to(torch.int32), logprobs, ranks.to(torch.int32)


def sample_logprobs(
    logits: Tensor, chosen: Tensor, num_top: Sequence[int], requested: Entries, ranking: Ranking
) -> list[TokenLogprobs]:
    """Return the report for each of the raw logits [n, vocab_size].

    chosen: int64 [n], the sampled tokens; num_top: [n], how many of the likeliest to report; requested: the token ids
    that were requested by name, owned by logit indices.
    """
    num_requested = np.bincount(requested.owners, minlength=len(chosen))
    k = min(max(num_top), logits.shape[1])
    scores = score_tokens(logits, _given(chosen, requested, num_requested), k, ranking)
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


def score_tokens(logits: Tensor, given: Tensor, k: int, ranking: Ranking) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids [n, k + g], their log-probabilities, and the ranks [n] of the first given ids, for ids [n, g].

    Columns: the first given token, the k likeliest, the other given ones.
    """
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    chunks = [_score_chunk(*chunk, k, ranking) for chunk in zip(logits.split(size), given.split(size), strict=True)]
    token_ids, logprobs, ranks = (torch.cat(tensors) for tensors in zip(*chunks, strict=True))
    return token_ids, logprobs, ranks


def _score_chunk(logits: Tensor, given: Tensor, k: int, ranking: Ranking) -> tuple[Tensor, Tensor, Tensor]:
    token_ids = torch.cat([given[:, :1], ranking.top(logits, k), given[:, 1:]], dim=1)
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, token_ids)
    ranks = 1 + (logits > logits.gather(1, given[:, :1])).sum(dim=1)
    return token_ids, logprobs, ranks
