"""Moves experts among the ranks, so that all have about as many tokens (expert-parallel load balancing).

Every so many steps the ranks add up how many tokens each expert has had since the last time, come to the same new slots
by themselves (`placement.balance`), and send each other the weights, layer after layer. When a group is formed anew,
because an engine was replaced, what is in the slots of all ranks is the truth; experts that were lost with a rank are
read again.

Driven by the model, on every rank of the group after the same steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
import torch
from torch import Tensor

from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.expert_slots import Slots
from eagleray.log import get_logger
from eagleray.models.moe.expert_placement import Move, balance, moves, rank_loads
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.weights import Weights

logger = get_logger(__name__)


class Rebalancer:
    """`blocks`: the stage's layers with experts, in order. `interval`: in steps; None: experts are only mended."""

    def __init__(
        self,
        *,
        blocks: Sequence[MoeBlock],
        plan: ExpertLayout,
        interval: int | None,
        kernels: KernelBackend,
        open_weights: Callable[[], AbstractContextManager[Weights]],
    ) -> None:
        self.num_moved = 0
        """Experts that came to this rank from others."""
        self.bytes_moved = 0
        """Of their weights."""
        self._layers = [(block, block.slots) for block in blocks if block.slots is not None]
        self._group = plan.group
        self._trace = plan.trace
        self._interval = interval
        self._kernels = kernels
        self._open_weights = open_weights
        self._num_steps = 0
        self._seen = plan.trace.counts.clone()

    def step(self) -> None:
        """A step is done: move experts if it is time to."""
        if self._interval is None or not self._layers:
            return
        self._num_steps += 1
        if self._num_steps % self._interval == 0:
            self._rebalance()

    def settle(self) -> None:
        """The group was formed: learn what is in the slots of the others, and see that no expert is missing."""
        self._num_steps = 0
        self._seen = self._trace.counts.clone()
        if not self._layers:
            return
        own = torch.tensor([slots.local_experts for _, slots in self._layers], device=self._seen.device)
        counts = [own.shape[1]] * self._group.size
        present = self._group.all_gather(own.T.contiguous(), counts).cpu().numpy()  # [num_slots, num_layers]
        lost: list[tuple[MoeBlock, int, int]] = []
        for (block, slots), experts in zip(self._layers, present.T, strict=True):
            before = slots.local_experts
            slots.assign(restore_missing(experts, self._seen.shape[1]))
            pairs = enumerate(zip(before, slots.local_experts, strict=True))
            lost += [(block, slot, new) for slot, (old, new) in pairs if old != new]
        self._read_again(lost)

    def _rebalance(self) -> None:
        load = self._group.all_reduce(self._trace.counts - self._seen).cpu().numpy()  # [num_layers, num_experts]
        self._seen = self._trace.counts.clone()
        size, before, after, num_moves = self._group.size, 0.0, 0.0, 0
        for (block, slots), tokens in zip(self._layers, load, strict=True):
            old = slots.experts
            new = balance(tokens, len(old), size, old)
            needed = moves(old, new)
            if needed:
                self._exchange(block, needed, slots.slots_per_rank)
                slots.assign(new)
            num_moves += len(needed)
            before += rank_loads(tokens, old, size).max()
            after += rank_loads(tokens, new, size).max()
        if self._group.rank == 0 and num_moves:
            mean = load.sum() / size
            message = "moved %d experts: the rank with most tokens would have had %.2f times the mean, not %.2f times"
            logger.info(message, num_moves, after / mean, before / mean)

    def _exchange(self, block: MoeBlock, needed: Sequence[Move], per_rank: int) -> None:
        """Bring the weights where they are to be. All are read before any is overwritten."""
        rank, size = self._group.rank, self._group.size
        away = [move for move in needed if move.source // per_rank != move.target // per_rank]
        sent = [move for move in away if move.source // per_rank == rank]
        received = [move for move in away if move.target // per_rank == rank]
        received.sort(key=lambda move: move.source // per_rank)  # from a rank they come in order of the target
        here = [move for move in needed if move.target // per_rank == rank and move.source // per_rank == rank]

        copies = [_read(block, move.source % per_rank) for move in here]
        rows = torch.stack([_read(block, slot) for slot in [move.source % per_rank for move in sent] or [0]])
        rows = rows[: len(sent)]  # also with nothing to send it has the bytes of a row
        send_counts = [sum(move.target // per_rank == other for move in sent) for other in range(size)]
        receive_counts = [sum(move.source // per_rank == other for move in received) for other in range(size)]
        arrived = self._group.all_to_all(rows, send_counts, receive_counts)
        for move, weights in zip([*here, *received], [*copies, *arrived], strict=True):
            _write(block, move.target % per_rank, weights)
        self.num_moved += len(received)
        self.bytes_moved += arrived.numel()

    def _read_again(self, lost: Sequence[tuple[MoeBlock, int, int]]) -> None:
        """(layer, own slot, expert)"""
        if not lost:
            return
        logger.info("reading %d experts that were lost with another rank", len(lost))
        with self._open_weights() as weights:
            for block, slot, expert in lost:
                gate_up, down = block.load_expert(expert, weights)
                made = self._kernels.expert_products([gate_up], [down])
                _write(block, slot, torch.cat(made.storage(0)))


def restore_missing(slots: Slots, num_experts: int) -> Slots:
    """Slots in which every expert is at least once: those that are missing in `slots` take the place of copies."""
    mended = slots.copy()
    copies = np.bincount(slots, minlength=num_experts)
    missing = np.flatnonzero(copies == 0).tolist()
    for slot in reversed(range(len(slots))):
        if missing and copies[slots[slot]] > 1:
            copies[slots[slot]] -= 1
            mended[slot] = missing.pop()
    assert not missing, "there are as many slots as experts"
    return mended


def _read(block: MoeBlock, slot: int) -> Tensor:
    """A copy of the weights in this rank's slot, uint8 [bytes]"""
    return torch.cat(block.products.storage(slot))


def _write(block: MoeBlock, slot: int, weights: Tensor) -> None:
    parts = block.products.storage(slot)
    for memory, part in zip(parts, weights.split([len(memory) for memory in parts]), strict=True):
        memory.copy_(part)
