"""A run of the largest steps before there is a cache, by which the memory that steps take on a GPU becomes known.

All ranks of an engine rehearse together. The cache of a rehearsal has one block, which all tokens share, so its numbers
mean nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from eagleray.kernels.forward_batch import ForwardBatch, PassLimits
from eagleray.kernels.kv_cache import KVCache
from eagleray.models.base import Model
from eagleray.worker.logprobs import PROMPT_CHUNK_SIZE, score_prompt
from eagleray.worker.sampler import TokenSampler


@torch.inference_mode()
def rehearse(
    model: Model, sampler: TokenSampler[Any], limits: PassLimits, *, block_size: int, num_logprobs: int
) -> None:
    """Run a step with as many tokens as possible, one with as many rows as possible, and the costliest reports of
    prompts and choices of tokens. `num_logprobs`: the most that a request may ask for."""
    shape = model.cache_shape(block_size)
    cache = KVCache.allocate(shape, num_blocks=1, dtype=model.cache_dtype, device=model.device)
    model.reserve(cache, limits)
    with model.groups.experts.rehearsing():
        for query_lens, seq_lens in (prompt_lens(limits), decode_lens(limits)):
            batch = _batch(query_lens, seq_lens, block_size)
            model.begin_step(False, batch.num_tokens)
            hidden = model.forward(batch, cache)
            if model.groups.mesh.is_last_stage and not model.spec.pools:
                logits = model.logits(hidden[: max(limits.num_rows, PROMPT_CHUNK_SIZE)])
                if logits is not None:
                    scored = logits[:PROMPT_CHUNK_SIZE]
                    targets = torch.zeros(len(scored), dtype=torch.int64, device=logits.device)
                    score_prompt(scored, targets[:, None], min(num_logprobs, logits.shape[1]), model.ranking)
    sampler.warm_up(limits.num_rows, num_logprobs=num_logprobs)
    if model.trace is not None:
        model.trace.counts.zero_()  # these tokens belong to no request


def prompt_lens(limits: PassLimits) -> tuple[list[int], list[int]]:
    """Return the tokens that each row computes and has in the end, for a step with the most tokens and the longest
    contexts."""
    longest = limits.num_positions
    num_tokens = min(limits.num_tokens, limits.num_rows * longest)
    full, rest = divmod(num_tokens, longest)
    query_lens = ([rest] if rest else []) + [longest] * full  # rows of one token come first
    return query_lens, [longest] * len(query_lens)


def decode_lens(limits: PassLimits) -> tuple[list[int], list[int]]:
    """Return the same for a step with the most rows, of one token each."""
    num_rows = min(limits.num_rows, limits.num_tokens)
    return [1] * num_rows, [1] * num_rows


def _batch(query_lens: list[int], seq_lens: list[int], block_size: int) -> ForwardBatch:
    """Return a batch whose rows have block 0 alone, at every position."""
    positions = np.concatenate(
        [np.arange(end - count, end) for count, end in zip(query_lens, seq_lens, strict=True)]
    ).astype(np.int32)
    return ForwardBatch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slot_mapping=positions % block_size,
        block_table=np.zeros((len(seq_lens), -(-max(seq_lens) // block_size)), np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        query_start_loc=np.cumsum([0, *query_lens]).astype(np.int32),
        num_decodes=query_lens.count(1),
    )
