"""Random draw of one token from each of a step's logits.

A row's token depends on its own logits, parameters and uniform number, bit for bit, whatever else is in the batch. Sums
of floating-point numbers do not give that (their order changes with the shape), so the probabilities become 64-bit
integers first: the likeliest token weighs `ONE`, and integer sums are exact in any order. A token that is less than
2**-40 times as likely is never drawn. The uniform number then picks from the kept tokens in order of their ids.

Restrictions in the order of vLLM: min_p, top_k, then top_p of the rest. Among equal logits the lower token id comes
first, so top_k keeps exactly k. The vocabulary is never sorted: a small top_k needs only the first tokens; otherwise a
histogram over the distance to the highest logit finds the bucket in which the last kept token lies, and only the tokens
of that bucket are sorted.

The ranking's own function draws if it has one, as on CPUs. What is here in torch has the same rules.

Uniform numbers depend on a seed and a position alone. They come from SplitMix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014) as a counter-based generator: its n-th output is a hash of
(initial state + n * golden gamma), so any position of any stream is reached at once, for all rows in a dozen numpy
operations. The stream of a seed starts at the first output of SplitMix64 for that seed, so the streams of related seeds
are not shifted copies of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagleray.kernels.ranking import DRAW_ONE_BITS, Draws, Ranking, rank_tokens
from eagleray.worker.token_table import IntArray

UInts = npt.NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
ONE = 2**DRAW_ONE_BITS
"""Weight of the likeliest token: 2**22 of them do not overflow."""
FEW = 256
"""Up to this top_k the first tokens are found faster than the histogram is made."""
BLOCK = 256
"""Tokens summed up at once to find the drawn one: first its block, then its index in the block."""
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**23}
"""Logits processed at once, which bounds the memory, and on a CPU keeps it in the cache."""

# A bucket is a distance's float32 without its low bits: 128 buckets between a distance and its double, however flat
# the distribution. All distances below 2**-14 are in one bucket, and so are all that are too large to have any weight.
BUCKET_SHIFT = 16
FIRST_BUCKET = int(np.float32(2**-14).view(np.int32)) >> BUCKET_SHIFT
WEIGHTLESS_DISTANCE = 32.0
"""Distance at which a token weighs nothing. Longer ones are cut to it, since exponentials of numbers such as minus
infinity take five times as long."""
WEIGHTLESS = (int(np.float32(WEIGHTLESS_DISTANCE).view(np.int32)) >> BUCKET_SHIFT) - FIRST_BUCKET


def stream_of(seed: int) -> np.uint64:
    """Return the initial state of the seed's stream."""
    return _mix(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN_GAMMA)[0]


def uniform(streams: UInts, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return a number of the open interval (0, 1) for each pair of stream and position, [n]."""
    bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * GOLDEN_GAMMA)
    return ((bits >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def _mix(state: UInts) -> UInts:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


@dataclass(frozen=True, slots=True)
class DrawSettings:
    """Parameters of each draw, [n]."""

    uniforms: npt.NDArray[np.float64]
    temperature: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float64]
    top_k: IntArray
    """The size of the vocabulary if top_k does not restrict the draw."""
    top_p: npt.NDArray[np.float64]

    def at(self, index: IntArray) -> DrawSettings:
        return DrawSettings(
            self.uniforms[index], self.temperature[index], self.min_p[index], self.top_k[index], self.top_p[index]
        )


class RandomSampler:
    """Owns the memory of the draws. It is made once, because fresh memory for each step costs more than the work."""

    def __init__(self, *, max_rows: int, vocab_size: int, device: torch.device, ranking: Ranking) -> None:
        self._ranking = ranking
        self._vocab_size = vocab_size
        self._device = device
        self._num_rows = num_rows = min(max_rows, max(1, CHUNK_ELEMENTS[device.type] // vocab_size))
        self._logits = torch.empty((num_rows, vocab_size), dtype=torch.float32, device=device)
        self._distances = torch.empty_like(self._logits)
        self._buckets = torch.empty_like(self._logits, dtype=torch.int32)
        self._bucket_ids = torch.empty_like(self._logits, dtype=torch.int64)
        # whole blocks, with room for at least one token id that does not exist and weighs nothing
        padded_size = (vocab_size // BLOCK + 1) * BLOCK
        self._weights = torch.zeros((num_rows, padded_size), dtype=torch.int64, device=device)

    def draw(
        self, logits: Tensor, highest: Tensor, logit_indices: IntArray, settings: DrawSettings, *, out: Tensor
    ) -> None:
        """Draw a token from each of the logits [n, vocab_size] at `logit_indices`, into the same index of `out` [n].

        highest: [n] the highest of each of the logits, which must be finite.
        """
        draws = Draws(
            logit_indices,
            settings.temperature,
            settings.uniforms,
            _least_weights(settings),
            settings.top_k,
            settings.top_p,
        )
        if self._ranking.draw(logits, highest, draws, out=out):
            return
        for group, draw in self._groups(settings):
            for part in np.split(group, range(self._num_rows, len(group), self._num_rows)):
                at = torch.from_numpy(logit_indices[part]).to(self._device)
                own = torch.index_select(logits, 0, at, out=self._logits[: len(part)])
                out[at] = draw(own, highest[at], settings.at(part))

    def process(self, logits: Tensor, highest: Tensor, settings: DrawSettings, chosen: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] by temperature, with minus infinity for the tokens that top_k, top_p and
        min_p drop.

        highest: as in `draw`; chosen: int64 [n], the drawn tokens. The uniform numbers do not matter.
        """
        processed = logits / _tensor(settings.temperature, logits)[:, None]
        drops = (settings.top_k < self._vocab_size) | _drops_by_weight(settings)
        is_few = settings.top_k <= FEW
        for indices in (np.flatnonzero(drops & is_few), np.flatnonzero(drops & ~is_few)):
            for part in np.split(indices, range(self._num_rows, max(1, len(indices)), self._num_rows)):
                if len(part):
                    at = torch.from_numpy(part).to(self._device)
                    own = torch.index_select(logits, 0, at, out=self._logits[: len(part)])
                    is_kept = self._is_kept(own, highest[at], settings.at(part))
                    is_kept.scatter_(1, chosen[at][:, None], True)
                    processed[at] = processed[at].masked_fill_(is_kept.logical_not_(), -torch.inf)
        return processed

    def _is_kept(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> Tensor:
        """Return whether each token is kept, bool [n, vocab_size], where every top_k is small or none is."""
        is_kept = torch.ones_like(logits, dtype=torch.bool)
        if (settings.top_k < self._vocab_size).any():
            is_kept = keep_top(logits, _tensor(settings.top_k, logits), int(settings.top_k.max()), self._ranking)
        by_weight = _drops_by_weight(settings)
        if by_weight.any():
            if settings.top_k.max() > FEW:
                has_weight = self._weigh_front(logits, highest, settings)[:, : self._vocab_size] > 0
            else:
                ids, weights = self._weigh_few(logits, highest, settings)
                has_weight = torch.zeros_like(is_kept).scatter_(1, ids, weights > 0)
            is_kept &= has_weight | _tensor(~by_weight, logits)[:, None]
        return is_kept

    def _groups(self, settings: DrawSettings) -> list[tuple[IntArray, Callable[..., Tensor]]]:
        """Group the draws by the method that serves them."""
        is_few = settings.top_k <= FEW
        is_cut = ~is_few & ((settings.top_k < self._vocab_size) | (settings.top_p < 1))
        groups = (
            (is_few, self._draw_from_few),
            (is_cut, self._draw_from_front),
            (~is_few & ~is_cut, self._draw_from_all),
        )
        return [(np.flatnonzero(is_member), draw) for is_member, draw in groups if is_member.any()]

    def _draw_from_all(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> Tensor:
        """Draw where top_k and top_p keep everything."""
        distances = _distances(logits, highest, settings, self._distances[: len(logits)])
        weights = _weigh(distances, settings, self._weights[: len(logits)])
        return _pick(weights, _tensor(settings.uniforms, logits))

    def _draw_from_few(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> Tensor:
        """Draw where every top_k is small."""
        ids, weights = self._weigh_few(logits, highest, settings)
        ids, order = ids.sort(dim=1)
        ends = weights.gather(1, order).cumsum(dim=1)
        index = (ends <= _target(ends[:, -1], _tensor(settings.uniforms, logits))[:, None]).sum(dim=1, keepdim=True)
        return ids.gather(1, index)[:, 0]

    def _weigh_few(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
        """Return the first token ids of each row, for the largest top_k, and their weights: 0 for dropped ones."""
        ids = self._ranking.top(logits, int(settings.top_k.max()))
        distances = _distances(logits.gather(1, ids), highest, settings)
        weights = _weigh(distances, settings, torch.empty_like(ids))
        columns = torch.arange(ids.shape[1], device=ids.device)
        weights.masked_fill_(columns >= _tensor(settings.top_k, logits)[:, None], 0)
        is_behind = weights.cumsum(dim=1) - weights >= _mass(weights, settings)[:, None]
        return ids, weights.masked_fill_(is_behind, 0)

    def _draw_from_front(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> Tensor:
        """Draw where top_k or top_p drop a number of tokens that is not known yet."""
        return _pick(self._weigh_front(logits, highest, settings), _tensor(settings.uniforms, logits))

    def _weigh_front(self, logits: Tensor, highest: Tensor, settings: DrawSettings) -> Tensor:
        """Return the weights of all tokens, [n, padded size]: 0 for dropped ones."""
        n, vocab_size = logits.shape
        distances = _distances(logits, highest, settings, self._distances[:n])
        buckets = torch.bitwise_right_shift(distances.view(torch.int32), BUCKET_SHIFT, out=self._buckets[:n])
        buckets.sub_(FIRST_BUCKET).clamp_(0, WEIGHTLESS)
        bucket_ids = self._bucket_ids[:n].copy_(buckets)  # scatter_add accepts only int64
        weights = _weigh(distances, settings, self._weights[:n])
        if (settings.top_k < vocab_size).any():
            each = torch.ones((1, 1), dtype=torch.int64, device=logits.device).expand_as(weights)
            _keep_front(weights, each, _tensor(settings.top_k, logits), logits, buckets, bucket_ids)
        if (settings.top_p < 1).any():
            _keep_front(weights, weights, _mass(weights, settings), logits, buckets, bucket_ids)
        return weights


def keep_top(logits: Tensor, top_k: Tensor, largest: int, ranking: Ranking) -> Tensor:
    """Return whether each token is among the first `top_k` [n] of its row, bool [n, vocab_size]. `largest`: the largest
    top_k, or more."""
    ids = ranking.top(logits, largest)
    columns = torch.arange(ids.shape[1], device=ids.device)
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, ids, columns < top_k[:, None])


def _drops_by_weight(settings: DrawSettings) -> npt.NDArray[np.bool_]:
    """Return whether top_p or min_p restrict each row, [n]."""
    return (settings.top_p < 1) | (settings.min_p > 0)


def _distances(logits: Tensor, highest: Tensor, settings: DrawSettings, out: Tensor | None = None) -> Tensor:
    """Return the distance of each logit below the highest one, by temperature: 0 for the likeliest token."""
    return torch.sub(highest[:, None], logits, out=out).div_(_tensor(settings.temperature, logits)[:, None])


def _weigh(distances: Tensor, settings: DrawSettings, out: Tensor) -> Tensor:
    """Write the weight of each token into the front of `out`, 0 below min_p. Changes the distances."""
    weights = out[:, : distances.shape[1]].copy_(distances.clamp_(max=WEIGHTLESS_DISTANCE).neg_().exp_().mul_(ONE))
    if settings.min_p.any():
        weights.masked_fill_(weights < _tensor(_least_weights(settings), weights)[:, None], 0)
    return out


def _least_weights(settings: DrawSettings) -> npt.NDArray[np.int64]:
    """Return the least weight that min_p keeps, [n]."""
    return np.ceil(settings.min_p * ONE).astype(np.int64)


def _mass(weights: Tensor, settings: DrawSettings) -> Tensor:
    """Return the least weight that top_p keeps, [n]."""
    total, top_p = weights.sum(dim=1), _tensor(settings.top_p, weights)
    return torch.where(top_p < 1, (top_p * total).ceil_().to(torch.int64), total)


def _keep_front(
    weights: Tensor, amounts: Tensor, target: Tensor, logits: Tensor, buckets: Tensor, bucket_ids: Tensor
) -> None:
    """Keep the shortest front of each of the logits, in descending order, whose amounts sum up to the target or more.

    The weights of the other tokens become zero. weights, amounts: [n, padded size]; the other matrices: [n,
    vocab_size].
    """
    n, vocab_size = logits.shape
    target = target[:, None]
    histogram = torch.zeros((n, WEIGHTLESS + 1), dtype=torch.int64, device=logits.device)
    histogram.scatter_add_(1, bucket_ids, amounts[:, :vocab_size])
    reached = histogram.cumsum(dim=1)
    edge = (reached < target).sum(dim=1, keepdim=True).clamp_(max=WEIGHTLESS)  # the bucket that the front ends in
    before = reached.gather(1, edge) - histogram.gather(1, edge)
    # the order of tokens without weight does not matter
    ids = rank_tokens(logits, buckets == edge.masked_fill(edge == WEIGHTLESS, -1).to(torch.int32))
    amount = amounts.gather(1, ids)
    is_behind = amount.cumsum(dim=1) - amount + before >= target
    kept = weights.gather(1, ids).masked_fill_(is_behind, 0)
    weights[:, :vocab_size].masked_fill_(buckets > edge.to(torch.int32), 0)
    weights.scatter_(1, ids, kept)


def _pick(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first token, by ascending id, at which the sum of the weights exceeds the target, [n]."""
    blocks = weights.unflatten(1, (-1, BLOCK))
    sums = blocks.sum(dim=-1)
    ends = sums.cumsum(dim=1)
    target = _target(ends[:, -1], uniforms)[:, None]
    block = (ends <= target).sum(dim=1, keepdim=True)
    rest = target - (ends - sums).gather(1, block)
    inside = blocks[torch.arange(len(weights), device=weights.device), block[:, 0]].cumsum(dim=1)
    return block[:, 0] * BLOCK + (inside <= rest).sum(dim=1)


def _target(total: Tensor, uniforms: Tensor) -> Tensor:
    """Map uniform numbers of (0, 1) to integers of [0, total), [n]."""
    return torch.minimum((uniforms * total).to(torch.int64), total - 1)


def _tensor(values: npt.NDArray[Any], like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like.device)
