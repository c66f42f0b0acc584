"""Draws one token for each line of logits.

A line's token depends on its own logits, parameters and uniform number, bit for bit, whatever else is in the batch and on
whatever line it stands. Sums of floating-point numbers do not give that (their order changes with the shape), so the
probabilities become 64-bit integers first: the likeliest token weighs `ONE`, and integer sums are exact in any order. What
weighs less than one 2**-40th of the likeliest is never drawn.

Restrictions in the order of vLLM: min_p, top_k, then top_p of what is left. Among equal logits the lower token id comes
first, so top_k keeps exactly k. A sort of the whole vocabulary is never needed: a histogram over the distance to the highest
logit finds the bucket in which the last kept token lies, and only the tokens of that bucket are sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.worker.ranking import rank_tokens

__all__ = ["Drawer", "Settings"]

ONE = 2**40
"""Weight of the likeliest token: 2**22 of them do not overflow."""
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
class Settings:
    """One entry for each line to draw for, [n]."""

    uniforms: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float64]
    top_k: npt.NDArray[np.int64]
    top_p: npt.NDArray[np.float64]

    def part(self, start: int, stop: int) -> Settings:
        return Settings(
            self.uniforms[start:stop],
            self.temperature[start:stop],
            self.min_p[start:stop],
            self.top_k[start:stop],
            self.top_p[start:stop],
        )


class Drawer:
    """Owns the memory to draw in, which is made when first needed."""

    def __init__(self, *, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._num_lines = max(1, CHUNK_ELEMENTS[device.type] // vocab_size)
        self._workspace: _Workspace | None = None

    def draw(self, logits: Tensor, highest: Tensor, lines: Tensor, settings: Settings) -> Tensor:
        """[n] a token for each of `lines` of the logits.

        `highest` has the highest logit of every line, which must be finite.
        """
        if self._workspace is None:
            self._workspace = _Workspace(self._num_lines, self._vocab_size, self._device)
        drawn = []
        for start in range(0, len(lines), self._num_lines):
            part = lines[start : start + self._num_lines]
            chosen = settings.part(start, start + len(part))
            drawn.append(_draw(logits[part], highest[part], chosen, self._workspace))
        return torch.cat(drawn)


class _Workspace:
    """Made once: fresh memory for each step costs more than the work that is done in it."""

    def __init__(self, num_lines: int, vocab_size: int, device: torch.device) -> None:
        self.distances = torch.empty((num_lines, vocab_size), dtype=torch.float32, device=device)
        self.bits = torch.empty((num_lines, vocab_size), dtype=torch.int32, device=device)
        self.buckets = torch.empty((num_lines, vocab_size), dtype=torch.int64, device=device)
        # whole blocks, with room for at least one token id that does not exist and weighs nothing
        padded_size = (vocab_size // BLOCK + 1) * BLOCK
        self.weights = torch.zeros((num_lines, padded_size), dtype=torch.int64, device=device)


def _draw(logits: Tensor, highest: Tensor, settings: Settings, workspace: _Workspace) -> Tensor:
    def tensor(values: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values).to(logits.device)

    n, vocab_size = logits.shape
    distances = torch.sub(highest[:, None], logits, out=workspace.distances[:n])
    distances.div_(tensor(settings.temperature)[:, None])
    has_top_k, has_top_p = bool((settings.top_k < vocab_size).any()), bool((settings.top_p < 1).any())
    buckets = workspace.buckets[:n]
    if has_top_k or has_top_p:
        bits = torch.bitwise_right_shift(distances.view(torch.int32), BUCKET_SHIFT, out=workspace.bits[:n])
        buckets.copy_(bits.sub_(FIRST_BUCKET).clamp_(0, WEIGHTLESS))
    weights = workspace.weights[:n]
    weights[:, :vocab_size].copy_(distances.neg_().exp_().mul_(ONE))
    if settings.min_p.any():
        least = tensor(np.ceil(settings.min_p * ONE).astype(np.int64))[:, None]
        weights.masked_fill_(weights < least, 0)
    if has_top_k:
        each = torch.ones((1, 1), dtype=torch.int64, device=logits.device).expand_as(weights)
        _keep_front(weights, each, tensor(settings.top_k), logits, buckets)
    if has_top_p:
        total = weights.sum(dim=-1)
        top_p = tensor(settings.top_p)
        mass = torch.where(top_p < 1, (top_p * total).ceil_().to(torch.int64), total)
        _keep_front(weights, weights, mass, logits, buckets)
    return _pick(weights, tensor(settings.uniforms))


def _keep_front(weights: Tensor, amounts: Tensor, target: Tensor, logits: Tensor, buckets: Tensor) -> None:
    """Keep the shortest front of each line, in order of its logits, whose amounts sum up to the target or more.

    The others' weights become zero. Weights and amounts are [n, padded size], logits and buckets [n, vocab_size].
    """
    n, vocab_size = logits.shape
    target = target[:, None]
    histogram = torch.zeros((n, WEIGHTLESS + 1), dtype=torch.int64, device=logits.device)
    histogram.scatter_add_(1, buckets, amounts[:, :vocab_size])
    reached = histogram.cumsum(dim=1)
    edge = (reached < target).sum(dim=1, keepdim=True).clamp_(max=WEIGHTLESS)  # the bucket that the front ends in
    before = reached.gather(1, edge) - histogram.gather(1, edge)
    at_edge = buckets == edge.masked_fill(
        edge == WEIGHTLESS, -1
    )  # where nothing weighs anything, order is of no interest
    ids = rank_tokens(logits, at_edge)
    amount = amounts.gather(1, ids)
    is_behind = amount.cumsum(dim=1) - amount + before >= target
    kept = weights.gather(1, ids).masked_fill_(is_behind, 0)
    weights[:, :vocab_size].masked_fill_(buckets > edge, 0)
    weights.scatter_(1, ids, kept)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """[n] the first token of each line up to which the weights, by ascending token id, exceed uniform * total."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1)
    ends = sums.cumsum(dim=1)
    total = ends[:, -1]
    target = torch.minimum((uniforms * total).to(torch.int64), total - 1)[:, None]
    block = (ends <= target).sum(dim=1, keepdim=True)
    rest = target - (ends - sums).gather(1, block)
    inside = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].cumsum(dim=1)
    return block[:, 0] * BLOCK + (inside <= rest).sum(dim=1)
