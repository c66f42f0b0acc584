"""The ways in which tokens and experts come together when the experts are divided over ranks that have different
tokens.

Each rank of the expert group routes its own tokens. With all-gather, every rank gets the tokens of all ranks and
computes what its experts add to each; the parts are added up in the order of the ranks. With all-to-all, a token goes
to the ranks that have an expert of it, once to each. The output of every pair (a token and one of its experts) comes
back, and the token's own rank adds them up in the order of its experts. So the bits of the result depend neither on
where the experts are nor on how many ranks there are.

`experts.MoeBlock` calls the dispatcher in every layer on every rank of the group, also on a rank that has no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.expert_slots import ABSENT, LayerExpertSlots
from eagleray.parallel.expert_group import ExpertGroup


class AllGatherTokenDispatcher:
    """Gives the tokens of all ranks to every rank: few messages, and bytes that grow with the number of ranks. The host
    reads nothing from the device: it has agreed on the numbers of tokens before the step."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        products: ExpertProducts,
        expert_slots: LayerExpertSlots,
        counts: Sequence[int],
    ) -> Tensor:
        """Return float32 [n, hidden_size], the weighted sums of the outputs of each token's experts. `x` is
        [n, hidden_size]; `ids` and `weights` of the experts are [n, top_k]; `counts` holds the number of tokens of each
        rank, n on this one."""
        group, parts = self._group, (x, ids.int(), weights.float())
        x, ids, weights = unpack_rows(group.all_gather(pack_rows(*parts), counts), like=parts)
        slots = expert_slots.global_map.find(ids)
        own = local_slots(slots, group.rank, expert_slots.slots_per_rank)
        return group.reduce_scatter(products.sums(x, own, weights), counts)


class AllToAllTokenDispatcher:
    """Sends a token only to the ranks of its experts. The host reads numbers of tokens from the device several times
    in each layer, so a GPU waits for it; there, `all-gather` is the default."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        products: ExpertProducts,
        expert_slots: LayerExpertSlots,
        counts: Sequence[int],
    ) -> Tensor:
        """See `AllGatherTokenDispatcher`."""
        group, (num_tokens, top_k) = self._group, ids.shape
        slots = expert_slots.global_map.find(ids, first_row=sum(counts[: group.rank]))
        routes = plan_routes(slots // expert_slots.slots_per_rank, group.size)
        receive_counts = self._exchange_counts(routes.token_counts, x.device)

        wanted = local_slots(slots[routes.tokens], routes.ranks[:, None], expert_slots.slots_per_rank)
        parts = (x[routes.tokens], wanted)
        received = group.all_to_all(pack_rows(*parts), routes.token_counts, receive_counts)
        hidden, own = unpack_rows(received, like=parts)

        is_here = own != ABSENT
        return_counts = [int(part.sum()) for part in is_here.split(list(receive_counts))]
        outputs = products.pairs(hidden, own)[is_here]  # [pairs that this rank computes, hidden_size]
        returned = group.all_to_all(outputs, return_counts, routes.pair_counts)

        outputs = torch.empty_like(returned).index_copy_(0, routes.pairs, returned)
        return products.weighted_sum(outputs.view(num_tokens, top_k, x.shape[1]), weights.float())

    def _exchange_counts(self, token_counts: list[int], device: torch.device) -> list[int]:
        """Return the number of tokens that each rank has for this one."""
        size = self._group.size
        own = torch.tensor([token_counts], device=device)
        counts: list[int] = self._group.all_gather(own, [1] * size)[:, self._group.rank].tolist()
        return counts


TokenDispatcher = AllGatherTokenDispatcher | AllToAllTokenDispatcher


def local_slots(slots: Tensor, rank: int | Tensor, slots_per_rank: int) -> Tensor:
    """Return the expert slots by `rank`'s own numbers, -1 for those of other ranks."""
    return torch.where(slots // slots_per_rank == rank, slots % slots_per_rank, ABSENT).int()


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """The order in which tokens go to ranks, and in which the outputs come back."""

    tokens: Tensor
    """[sum(token_counts)] indices of the tokens to send: first those for rank 0, and in rising order for each rank"""
    ranks: Tensor
    """[sum(token_counts)] destination of each"""
    token_counts: list[int]
    """[num_ranks] tokens for each rank"""
    pairs: Tensor
    """[n x top_k] pairs (token x top_k + place among its experts): first the pairs that rank 0 computes, and in
    rising order for each rank"""
    pair_counts: list[int]
    """[num_ranks] pairs that each rank computes"""


def plan_routes(ranks: Tensor, num_ranks: int) -> Routes:
    """Return the routes of pairs of which rank `ranks` [n, top_k] computes each."""
    ranks = ranks.long()
    is_needed = torch.zeros(len(ranks), num_ranks, dtype=torch.bool, device=ranks.device).scatter_(1, ranks, True)
    targets, tokens = is_needed.T.nonzero(as_tuple=True)
    by_pair = ranks.reshape(-1)
    return Routes(
        tokens=tokens,
        ranks=targets,
        token_counts=is_needed.sum(0).tolist(),
        pairs=by_pair.argsort(stable=True),
        pair_counts=torch.bincount(by_pair, minlength=num_ranks).tolist(),
    )


def pack_rows(*parts: Tensor) -> Tensor:
    """Join tensors with the same number of rows to one, uint8 [n, bytes of a row], so that they travel together."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack_rows(rows: Tensor, *, like: Sequence[Tensor]) -> list[Tensor]:
    """Split what `pack_rows` has joined into tensors with the dtypes and features of `like`."""
    ends = list(accumulate(part.shape[1] * part.itemsize for part in like))
    return [
        # a copy of its own: the bytes of a number must begin at a multiple of its size
        rows[:, end - part.shape[1] * part.itemsize : end].clone(memory_format=torch.contiguous_format).view(part.dtype)
        for part, end in zip(like, ends, strict=True)
    ]
