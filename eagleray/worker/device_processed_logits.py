"""Logits after the sampling parameters, for reports of a device sampler.

Plain torch on the device, without a read by the host. The cut of top_p is the one that the kernels of the draw left in
their workspace, so report and draw agree. Driven by the device sampler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagleray.kernels.cuda.sampling_record import ONE, RECORD_WORDS, RecordField
from eagleray.kernels.cuda.triton.sampling import SamplingTensors, SamplingWorkspace
from eagleray.kernels.ranking import Ranking
from eagleray.worker.logprobs import CHUNK_ELEMENTS
from eagleray.worker.random_sampler import keep_top


def process_logits(
    tensors: SamplingTensors,
    workspace: SamplingWorkspace,
    reported: Tensor,
    chosen: Tensor,
    ranking: Ranking,
    *,
    max_top_k: int,
    drops_by_weight: bool,
) -> tuple[Tensor, Tensor]:
    """Return the adjusted logits of the reported rows, [num_reported, vocab_size], and the same by temperature with
    minus infinity for the tokens that top_k, top_p and min_p drop.

    reported: int32 [num_reported], indices of the logits; chosen: int32 [num_reported], their tokens; `max_top_k`: the
    largest top_k that restricts one of these rows, or 0; `drops_by_weight`: whether one of them has top_p or min_p.
    """
    logits = tensors.logits.index_select(0, reported)
    num_rows = len(tensors.last_tokens)
    records = tensors.memory[: num_rows * RECORD_WORDS].view(num_rows, RECORD_WORDS)
    records = records.index_select(0, tensors.rows.index_select(0, reported))
    temperature = _field(records, RecordField.SCALE, torch.float32)
    processed = logits / temperature[:, None]
    if not max_top_k and not drops_by_weight:
        return logits, processed
    cuts = [
        tensor.index_select(0, reported) for tensor in (workspace.highest, workspace.cut_keys, workspace.cut_counts)
    ]
    size = max(1, CHUNK_ELEMENTS[logits.device.type] // logits.shape[1])
    columns = [tensor.split(size) for tensor in (logits, processed, records, temperature, chosen, *cuts)]
    for own, out, record, scale, token, *cut in zip(*columns, strict=True):
        is_kept = torch.ones_like(own, dtype=torch.bool)
        if max_top_k:
            top_k = record[:, RecordField.TOP_K]
            is_restricted = (top_k < own.shape[1])[:, None]
            is_kept = keep_top(own, top_k, max_top_k, ranking) | is_restricted.logical_not_()
        if drops_by_weight:
            is_kept &= _keep_by_weight(own, record, scale, *cut)
        # torch and the kernels may round an exponential differently; a forced token may really have been dropped
        at = token.to(torch.int64)[:, None]
        is_drawn = (record[:, RecordField.NUM_FORCED] == 0)[:, None]
        is_kept.scatter_(1, at, is_kept.gather(1, at) | is_drawn)
        out.masked_fill_(is_kept.logical_not_(), -torch.inf)
    return logits, processed


def _keep_by_weight(
    logits: Tensor, records: Tensor, temperature: Tensor, highest: Tensor, cut_keys: Tensor, cut_counts: Tensor
) -> Tensor:
    """Return whether each token is before the cut of top_p and not below min_p, bool [n, vocab_size]; always true in
    rows that have neither."""
    distances = (highest[:, None] - logits).abs_() / temperature[:, None]
    keys = distances.view(torch.int32)
    is_tie = keys == cut_keys[:, None]
    is_kept = (keys < cut_keys[:, None]) | (is_tie & (is_tie.cumsum(dim=1) <= cut_counts[:, None]))
    min_weight = _field(records, RecordField.MIN_WEIGHT, torch.int64)
    weights = (distances.neg_().exp_() * ONE).to(torch.int64)
    is_kept &= weights >= min_weight[:, None]
    has_neither = (_field(records, RecordField.TOP_P, torch.float64) >= 1) & (min_weight == 0)
    return is_kept | has_neither[:, None]


def _field(records: Tensor, field: RecordField, dtype: torch.dtype) -> Tensor:
    """Return a field of each record, [n]."""
    num_words = dtype.itemsize // records.element_size()
    return records[:, field : field + num_words].contiguous().view(dtype)[:, 0]
