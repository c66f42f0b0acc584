"""Draws one token for each line of logits.

A line's token depends on its own logits, parameters and uniform number, bit for bit, whatever else is in the batch.
Sums of floating-point numbers do not give that (their order changes with the shape), so the probabilities become
64-bit integers first: the likeliest token weighs `ONE`, and integer sums are exact in any order. What is less than
2**-40 times as likely is never drawn. The uniform number then picks from the kept tokens in order of their ids.

Restrictions in the order of vLLM: min_p, top_k, then top_p of what is left. Among equal logits the lower token id comes
first, so top_k keeps exactly k. The vocabulary is never sorted: with a small top_k only the first tokens are looked at;
otherwise a histogram over the distance to the highest logit finds the bucket in which the last kept token lies, and the
tokens of that bucket are sorted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.ranking import Ranking, rank_tokens
from eagleray.worker.token_table import IntArray

ONE = 2**40
"""Weight of the likeliest token: 2**22 of them do not overflow."""
FEW = 256
"""Up to this top_k the first tokens are found faster than the histogram is made."""
BLOCK = 256
"""Tokens summed up at once to find the drawn one: first its block, then its place there."""
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**23}
"""Logits worked on at once: it bounds the memory, and on a CPU keeps it in the cache."""

# A bucket is a distance's float32 without its low bits: 128 buckets between a distance and its double, however flat
# the distribution. Below 2**-14 all is one bucket; so is what is too far away to have any weight.
BUCKET_SHIFT = 16
FIRST_BUCKET = int(np.float32(2**-14).view(np.int32)) >> BUCKET_SHIFT
WEIGHTLESS = (int(np.float32(32).view(np.int32)) >> BUCKET_SHIFT) - FIRST_BUCKET


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """One entry for each line to draw for, [n]."""

    uniforms: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float64]
    top_k: IntArray
    """The size of the vocabulary for all."""
    top_p: npt.NDArray[np.float64]

    def at(self, index: IntArray) -> DrawSettings:
        return DrawSettings(
            self.uniforms[index], self.temperature[index], self.min_p[index], self.top_k[index], self.top_p[index]
        )


class RandomSampler:
    """Owns the memory to draw in, which is made when first needed."""

    def __init__(self, *, max_lines: int, vocab_size: int, device: torch.device, ranking: Ranking) -> None:
        self._ranking = ranking
        self._vocab_size = vocab_size
        self._device = device
        self._num_lines = min(max_lines, max(1, CHUNK_ELEMENTS[device.type] // vocab_size))
        self._workspace: _Workspace | None = None

    def draw(
        self,
        logits: Tensor,
        highest: Tensor,
        lines: IntArray,
        settings: DrawSettings,
        *,
        out: Tensor,
    ) -> None:
        """Draw a token for each of `lines` of the logits [n, vocab_size], into its place in `out` [n].

        highest: [n] the highest logit of each line, which must be finite.
        """
        if self._workspace is None:
            self._workspace = _Workspace(self._num_lines, self._vocab_size, self._device, self._ranking)
        for group, draw in self._groups(settings):
            for part in np.split(group, range(self._num_lines, len(group), self._num_lines)):
                at = torch.from_numpy(lines[part]).to(self._device)
                own = torch.index_select(logits, 0, at, out=self._workspace.logits[: len(part)])
                out[at] = draw(own, highest[at], settings.at(part), self._workspace)

    def _groups(self, settings: DrawSettings) -> list[tuple[IntArray, Callable[..., Tensor]]]:
        """Lines that are drawn for in the same way."""
        is_few = settings.top_k <= FEW
        is_cut = ~is_few & ((settings.top_k < self._vocab_size) | (settings.top_p < 1))
        groups = (is_few, _draw_from_few), (is_cut, _draw_from_front), (~is_few & ~is_cut, _draw_from_all)
        return [(np.flatnonzero(is_member), draw) for is_member, draw in groups if is_member.any()]


class _Workspace:
    """Made once: fresh memory for each step costs more than the work that is done in it."""

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device, ranking: Ranking) -> None:
        self.ranking = ranking
        self.logits = torch.empty((num_lines, vocab_size), dtype=torch.float32, device=device)
        self.distances = torch.empty_like(self.logits)
        self.buckets = torch.empty_like(self.logits, dtype=torch.int32)
        self.bucket_ids = torch.empty_like(self.logits, dtype=torch.int64)
        # whole blocks, with room for at least one token id that does not exist and weighs nothing
        padded_size = (vocab_size // BLOCK + 1) * BLOCK
        self.weights = torch.zeros((num_lines, padded_size), dtype=torch.int64, device=device)


def _draw_from_all(logits: Tensor, highest: Tensor, settings: DrawSettings, workspace: _Workspace) -> Tensor:
    """top_k and top_p keep everything."""
    distances = _distances(logits, highest, settings, workspace.distances[: len(logits)])
    weights = _weigh(distances, settings, workspace.weights[: len(logits)])
    return _pick(weights, _tensor(settings.uniforms, logits))


def _draw_from_few(logits: Tensor, highest: Tensor, settings: DrawSettings, workspace: _Workspace) -> Tensor:
    """Every top_k is small."""
    ids = workspace.ranking.top(logits, int(settings.top_k.max()))
    distances = _distances(logits.gather(1, ids), highest, settings)
    weights = _weigh(distances, settings, torch.empty_like(ids))
    columns = torch.arange(ids.shape[1], device=ids.device)
    weights.masked_fill_(columns >= _tensor(settings.top_k, logits)[:, None], 0)
    is_behind = weights.cumsum(dim=1) - weights >= _mass(weights, settings)[:, None]
    ids, order = ids.sort(dim=1)
    ends = weights.masked_fill_(is_behind, 0).gather(1, order).cumsum(dim=1)
    index = (ends <= _target(ends[:, -1], _tensor(settings.uniforms, logits))[:, None]).sum(dim=1, keepdim=True)
    return ids.gather(1, index)[:, 0]


def _draw_from_front(logits: Tensor, highest: Tensor, settings: DrawSettings, workspace: _Workspace) -> Tensor:
    """top_k or top_p drop tokens, how many is not known."""
    n, vocab_size = logits.shape
    distances = _distances(logits, highest, settings, workspace.distances[:n])
    buckets = torch.bitwise_right_shift(distances.view(torch.int32), BUCKET_SHIFT, out=workspace.buckets[:n])
    buckets.sub_(FIRST_BUCKET).clamp_(0, WEIGHTLESS)
    bucket_ids = workspace.bucket_ids[:n].copy_(buckets)  # scatter_add takes nothing but int64
    weights = _weigh(distances, settings, workspace.weights[:n])
    if (settings.top_k < vocab_size).any():
        each = torch.ones((1, 1), dtype=torch.int64, device=logits.device).expand_as(weights)
        _keep_front(weights, each, _tensor(settings.top_k, logits), logits, buckets, bucket_ids)
    if (settings.top_p < 1).any():
        _keep_front(weights, weights, _mass(weights, settings), logits, buckets, bucket_ids)
    return _pick(weights, _tensor(settings.uniforms, logits))


def _distances(logits: Tensor, highest: Tensor, settings: DrawSettings, out: Tensor | None = None) -> Tensor:
    """How far below the highest logit each one is, by temperature: 0 is the likeliest token."""
    return torch.sub(highest[:, None], logits, out=out).div_(_tensor(settings.temperature, logits)[:, None])


def _weigh(distances: Tensor, settings: DrawSettings, out: Tensor) -> Tensor:
    """The weight of each token into the front of `out`, 0 below min_p. Changes the distances."""
    weights = out[:, : distances.shape[1]].copy_(distances.neg_().exp_().mul_(ONE))
    if settings.min_p.any():
        weights.masked_fill_(weights < _tensor(np.ceil(settings.min_p * ONE).astype(np.int64), weights)[:, None], 0)
    return out


def _mass(weights: Tensor, settings: DrawSettings) -> Tensor:
    """[n] the weight that top_p keeps at the least."""
    total, top_p = weights.sum(dim=1), _tensor(settings.top_p, weights)
    return torch.where(top_p < 1, (top_p * total).ceil_().to(torch.int64), total)


def _keep_front(
    weights: Tensor, amounts: Tensor, target: Tensor, logits: Tensor, buckets: Tensor, bucket_ids: Tensor
) -> None:
    """Keep the shortest front of each line, in order of its logits, whose amounts sum up to the target or more.

    The others' weights become zero. weights, amounts: [n, padded size]; the other matrices: [n, vocab_size].
    """
    n, vocab_size = logits.shape
    target = target[:, None]
    histogram = torch.zeros((n, WEIGHTLESS + 1), dtype=torch.int64, device=logits.device)
    histogram.scatter_add_(1, bucket_ids, amounts[:, :vocab_size])
    reached = histogram.cumsum(dim=1)
    edge = (reached < target).sum(dim=1, keepdim=True).clamp_(max=WEIGHTLESS)  # the bucket that the front ends in
    before = reached.gather(1, edge) - histogram.gather(1, edge)
    # where nothing weighs anything, order is of no interest
    ids = rank_tokens(logits, buckets == edge.masked_fill(edge == WEIGHTLESS, -1).to(torch.int32))
    amount = amounts.gather(1, ids)
    is_behind = amount.cumsum(dim=1) - amount + before >= target
    kept = weights.gather(1, ids).masked_fill_(is_behind, 0)
    weights[:, :vocab_size].masked_fill_(buckets > edge.to(torch.int32), 0)
    weights.scatter_(1, ids, kept)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[n] the first token of each line, by ascending id, at which the sum of the weights exceeds the target."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1)
    ends = sums.cumsum(dim=1)
    target = _target(ends[:, -1], uniforms)[:, None]
    block = (ends <= target).sum(dim=1, keepdim=True)
    rest = target - (ends - sums).gather(1, block)
    inside = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].cumsum(dim=1)
    return block[:, 0] * BLOCK + (inside <= rest).sum(dim=1)


def _target(total: Tensor, uniforms: Tensor) -> Tensor:
    """[n] uniform numbers of (0, 1) to whole numbers of [0, total)."""
    return torch.minimum((uniforms * total).to(torch.int64), total - 1)


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
