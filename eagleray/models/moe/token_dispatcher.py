"""How rows and experts come together when the experts are divided over ranks that have different rows.

A rank of the expert group routes its own rows. By all-gather every rank gets the rows of all, computes what its experts
add to each, and the parts are added up in the order of the ranks. By all-to-all a row goes to the ranks that have an
expert of it, once to each; the output of every pair (a row and one of its experts) comes back, and the row's own rank
adds them up in the order of its experts: so the bits of the result depend neither on where the experts are nor on how
many ranks there are.

Driven by `experts.MoeBlock`, on every rank of the group in every layer, also by a rank that has no rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.expert_slots import ABSENT, LayerExpertSlots
from eagleray.parallel.expert_group import ExpertGroup


class TokenDispatcher(Protocol):
    """The weighted sum of what the experts of each row compute. All ranks call it together."""

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        products: ExpertProducts,
        places: LayerExpertSlots,
        counts: Sequence[int],
    ) -> Tensor:
        """x [n, hidden_size], ids and weights [n, top_k] -> float32 [n, hidden_size]. `ids` are experts; `counts`: how
        many rows each rank has, n on this one."""
        ...


class AllGatherTokenDispatcher:
    """Every rank gets the rows of all: few messages, and bytes that grow with the number of ranks."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        products: ExpertProducts,
        places: LayerExpertSlots,
        counts: Sequence[int],
    ) -> Tensor:
        group, parts = self._group, (x, ids.int(), weights.float())
        x, ids, weights = unpack_rows(group.all_gather(pack_rows(*parts), counts), like=parts)
        slots = places.global_map.find(ids)
        own = local_slots(slots, group.rank, places.slots_per_rank)
        return group.reduce_scatter(products.sums(x, own, weights), counts)


class AllToAllTokenDispatcher:
    """A row goes only where its experts are."""

    def __init__(self, group: ExpertGroup) -> None:
        self._group = group

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        products: ExpertProducts,
        places: LayerExpertSlots,
        counts: Sequence[int],
    ) -> Tensor:
        group, (num_rows, top_k) = self._group, ids.shape
        slots = places.global_map.find(ids, first_row=sum(counts[: group.rank]))
        routes = plan_routes(slots // places.slots_per_rank, group.size)
        receive_counts = self._exchange_counts(routes.row_counts, x.device)

        wanted = local_slots(slots[routes.rows], routes.ranks[:, None], places.slots_per_rank)
        parts = (x[routes.rows], wanted)
        received = group.all_to_all(pack_rows(*parts), routes.row_counts, receive_counts)
        rows, own = unpack_rows(received, like=parts)

        here = own != ABSENT
        return_counts = [int(part.sum()) for part in here.split(list(receive_counts))]
        outputs = products.pairs(rows, own)[here]  # [pairs that this rank computes, hidden_size]
        returned = group.all_to_all(outputs, return_counts, routes.pair_counts)

        outputs = torch.empty_like(returned).index_copy_(0, routes.pairs, returned)
        return products.weighted_sum(outputs.view(num_rows, top_k, x.shape[1]), weights.float())

    def _exchange_counts(self, row_counts: list[int], device: torch.device) -> list[int]:
        """How many rows each rank has for this one."""
        size = self._group.size
        own = torch.tensor([row_counts], device=device)
        counts: list[int] = self._group.all_gather(own, [1] * size)[:, self._group.rank].tolist()
        return counts


def local_slots(slots: Tensor, rank: int | Tensor, slots_per_rank: int) -> Tensor:
    """The slots as `rank` counts its own, -1 for those of others."""
    return torch.where(slots // slots_per_rank == rank, slots % slots_per_rank, ABSENT).int()


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """In which order rows go to ranks, and what they compute comes back."""

    rows: Tensor
    """[sum(row_counts)] the rows to send, those for rank 0 first, and for a rank in rising order"""
    ranks: Tensor
    """[sum(row_counts)] where each goes"""
    row_counts: list[int]
    """[num_ranks]"""
    pairs: Tensor
    """[n x top_k] pairs (row x top_k + place), those that rank 0 computes first, and for a rank in rising order"""
    pair_counts: list[int]
    """[num_ranks]"""


def plan_routes(ranks: Tensor, num_ranks: int) -> Routes:
    """`ranks` [n, top_k]: which rank computes each pair."""
    ranks = ranks.long()
    needed = torch.zeros(len(ranks), num_ranks, dtype=torch.bool, device=ranks.device).scatter_(1, ranks, True)
    targets, rows = needed.T.nonzero(as_tuple=True)
    by_pair = ranks.reshape(-1)
    return Routes(
        rows=rows,
        ranks=targets,
        row_counts=needed.sum(0).tolist(),
        pairs=by_pair.argsort(stable=True),
        pair_counts=torch.bincount(by_pair, minlength=num_ranks).tolist(),
    )


def pack_rows(*parts: Tensor) -> Tensor:
    """Tensors of as many rows each, as one: uint8 [n, bytes of a row], so that they travel together."""
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)


def unpack_rows(rows: Tensor, *, like: Sequence[Tensor]) -> list[Tensor]:
    """What `pack_rows` has put together; `like`: tensors with those dtypes and features."""
    ends = list(accumulate(part.shape[1] * part.itemsize for part in like))
    return [
        # a copy of its own: the bytes of a number must begin at a multiple of its size
        rows[:, end - part.shape[1] * part.itemsize : end].clone(memory_format=torch.contiguous_format).view(part.dtype)
        for part, end in zip(like, ends, strict=True)
    ]
