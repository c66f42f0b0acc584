"""Expert-parallel load balancing: moves experts among the ranks, so that all ranks compute about equally many tokens.

Every `interval` steps the ranks add up the tokens that each expert has had since the last time, compute the same new
expert slots independently (`expert_placement.balance`), and send each other the weights, layer after layer. When a
group is formed again, because an engine was replaced, the experts that are in the slots of all ranks count, and experts
that were lost with a rank are read again.

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
from eagleray.models.layers.layer import storage_of
from eagleray.models.moe.expert_placement import Move, balance, find_moves, rank_loads
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.weights import Weights

logger = get_logger(__name__)


class Rebalancer:
    """`blocks` are the stage's layers with experts, in order. `interval` is in steps; None: lost experts are restored,
    but none is moved."""

    def __init__(
        self,
        *,
        blocks: Sequence[MoeBlock],
        layout: ExpertLayout,
        interval: int | None,
        kernels: KernelBackend,
        open_weights: Callable[[], AbstractContextManager[Weights]],
    ) -> None:
        self.num_moved = 0
        """Experts that this rank has received from others."""
        self.bytes_moved = 0
        """Bytes of the weights of these experts."""
        self._layers = [(block, block.slots) for block in blocks if block.slots is not None]
        self._group = layout.group
        self._trace = layout.trace
        self._interval = interval
        self._kernels = kernels
        self._open_weights = open_weights
        self._num_steps = 0
        self._seen = layout.trace.counts.clone()

    def step(self, *, may_move: bool = True) -> None:
        """Count a step, and move experts if it is time to and `may_move` is true on all ranks of the group."""
        if self._interval is None or not self._layers:
            return
        self._num_steps += 1
        if self._num_steps % self._interval == 0 and self._may_all_move(may_move):
            self._rebalance()

    def on_group_formed(self) -> None:
        """Exchange the contents of the expert slots in a new group, and read the experts that no rank has."""
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
        self._restore(lost)

    def _may_all_move(self, may_move: bool) -> bool:
        """Whether `may_move` is true on all ranks. It may differ: ranks open and close updates in different steps."""
        num_that_keep = torch.tensor([int(not may_move)], dtype=self._seen.dtype, device=self._seen.device)
        return int(self._group.all_reduce(num_that_keep).item()) == 0

    def _rebalance(self) -> None:
        load = self._group.all_reduce(self._trace.counts - self._seen).cpu().numpy()  # [num_layers, num_experts]
        self._seen = self._trace.counts.clone()
        size, before, after, num_moves = self._group.size, 0.0, 0.0, 0
        for (block, slots), tokens in zip(self._layers, load, strict=True):
            old = slots.experts
            new = balance(tokens, len(old), size, old)
            needed = find_moves(old, new)
            if needed:
                self._exchange(block, needed, slots.slots_per_rank)
                slots.assign(new)
            num_moves += len(needed)
            before += rank_loads(tokens, old, size).max()
            after += rank_loads(tokens, new, size).max()
        if self._group.rank == 0 and num_moves:
            mean = load.sum() / size
            logger.info(
                "moved %d experts: the most loaded rank would have had %.2f times the mean number of tokens, not "
                "%.2f times",
                num_moves,
                after / mean,
                before / mean,
            )

    def _exchange(self, block: MoeBlock, needed: Sequence[Move], per_rank: int) -> None:
        """Copy the weights to their new expert slots. All are read before any is written."""
        rank, size = self._group.rank, self._group.size
        away = [move for move in needed if move.source // per_rank != move.target // per_rank]
        sent = [move for move in away if move.source // per_rank == rank]
        received = [move for move in away if move.target // per_rank == rank]
        received.sort(key=lambda move: move.source // per_rank)  # each rank sends them in order of the target
        here = [move for move in needed if move.target // per_rank == rank and move.source // per_rank == rank]

        copies = [_read(block, move.source % per_rank) for move in here]
        rows = torch.stack([_read(block, slot) for slot in [move.source % per_rank for move in sent] or [0]])
        rows = rows[: len(sent)]  # also with nothing to send, a row has the bytes of an expert
        send_counts = [sum(move.target // per_rank == other for move in sent) for other in range(size)]
        receive_counts = [sum(move.source // per_rank == other for move in received) for other in range(size)]
        arrived = self._group.all_to_all(rows, send_counts, receive_counts)
        for move, weights in zip([*here, *received], [*copies, *arrived], strict=True):
            _write(block, move.target % per_rank, weights)
        self.num_moved += len(received)
        self.bytes_moved += arrived.numel()

    def _restore(self, lost: Sequence[tuple[MoeBlock, int, int]]) -> None:
        """Read the weights of experts (layer, own expert slot, expert) from the checkpoint."""
        if not lost:
            return
        logger.info("reading %d experts again that were lost with another rank", len(lost))
        with self._open_weights() as weights:
            for block, slot, expert in lost:
                made = block.expert(expert).make(weights, self._kernels)
                _write(block, slot, torch.cat(storage_of(made)))


def restore_missing(slots: Slots, num_experts: int) -> Slots:
    """Return expert slots that hold every expert at least once: experts that are missing in `slots` replace copies of
    others."""
    restored = slots.copy()
    copies = np.bincount(slots, minlength=num_experts)
    missing = np.flatnonzero(copies == 0).tolist()
    for slot in reversed(range(len(slots))):
        if missing and copies[slots[slot]] > 1:
            copies[slots[slot]] -= 1
            restored[slot] = missing.pop()
    assert not missing, "there are no fewer slots than experts"
    return restored


def _read(block: MoeBlock, slot: int) -> Tensor:
    """Return a copy of the weights in this rank's expert slot, uint8 [bytes]."""
    return torch.cat(block.products.storage(slot))


def _write(block: MoeBlock, slot: int, weights: Tensor) -> None:
    parts = block.products.storage(slot)
    for memory, part in zip(parts, weights.split([len(memory) for memory in parts]), strict=True):
        memory.copy_(part)
