"""Log-probabilities of the model's own distribution, before any sampling parameter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs
from eagleray.worker.ranking import top_tokens
from eagleray.worker.token_table import Entries

__all__ = ["prompt_logprobs", "sample_logprobs"]

CHUNK_ELEMENTS = 2**20
"""Logits worked on at once, to bound the memory."""


def prompt_logprobs(logits: Tensor, next_token_ids: Tensor, k: int, start: int) -> PromptLogprobs:
    """The log-probabilities of prompt positions `start`, `start + 1`, … and of the `k` likeliest tokens there.

    logits: float32 [n, vocab_size], of the positions before them; next_token_ids: int64 [n], the prompt's own tokens.
    """
    ids, values, ranks = _score(logits, torch.arange(len(logits), device=logits.device), next_token_ids[:, None], k)
    return PromptLogprobs(
        start=start,
        token_ids=ids.to(torch.int32).cpu().numpy(),
        logprobs=values.cpu().numpy(),
        ranks=ranks.to(torch.int32).cpu().numpy(),
    )


def sample_logprobs(
    logits: Tensor, lines: Tensor, chosen: Tensor, num_top: Sequence[int], asked: Entries
) -> list[TokenLogprobs]:
    """What to report for each of `lines` of the raw logits [n, vocab_size].

    chosen: int64 [m], the tokens that were sampled; num_top: [m], how many of the likeliest to report; asked: the token ids
    that were asked for, with owners in 0 … m - 1.
    """
    num_asked = np.bincount(asked.owners, minlength=len(lines))
    columns = np.arange(len(asked.owners)) - (np.cumsum(num_asked) - num_asked)[asked.owners]
    given = chosen[:, None].repeat(1, 1 + int(num_asked.max()))  # the chosen one fills up what others asked more
    owners, columns_, token_ids = (
        torch.from_numpy(array).to(logits.device) for array in (asked.owners, columns, asked.token_ids)
    )
    given[owners, 1 + columns_] = token_ids
    k = max(num_top)
    ids, values, ranks = (scored.tolist() for scored in _score(logits, lines, given, k))
    k = min(k, logits.shape[1])
    return [
        TokenLogprobs(
            own_ids[: 1 + top] + own_ids[1 + k : 1 + k + extra],
            own_values[: 1 + top] + own_values[1 + k : 1 + k + extra],
            rank,
        )
        for own_ids, own_values, rank, top, extra in zip(
            ids, values, ranks, np.minimum(num_top, k).tolist(), num_asked.tolist(), strict=True
        )
    ]


def _score(logits: Tensor, lines: Tensor, given: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids and log-probabilities [m, 1 + k + g - 1], and ranks [m] of the first given id, from given ids [m, g].

    Columns: the first given id, the k likeliest, the other given ids.
    """
    size = max(1, CHUNK_ELEMENTS // logits.shape[1])
    parts = [
        _score_part(logits[some], some_given, k)
        for some, some_given in zip(lines.split(size), given.split(size), strict=True)
    ]
    ids, values, ranks = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return ids, values, ranks


def _score_part(logits: Tensor, given: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    ids = torch.cat([given[:, :1], top_tokens(logits, k), given[:, 1:]], dim=1)
    values = torch.log_softmax(logits, dim=-1).gather(1, ids)
    ranks = 1 + (logits > logits.gather(1, given[:, :1])).sum(dim=1)
    return ids, values, ranks
