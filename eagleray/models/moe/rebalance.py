"""Expert-parallel load balancing: moves experts among the ranks, so that all ranks compute about equally many tokens.

Every `interval` steps the ranks add up the tokens that each expert has had since the last time, compute the same new
expert slots independently (`expert_placement.balance`), and send each other the weights, layer after layer.

When a group is formed again, because an engine was replaced, added or is about to leave, the experts that are in the
slots of all ranks count: from them all ranks compute where the experts belong in this group
(`expert_placement.place_anew`). Experts come from ranks that have them; those that were lost with a rank are read
again. Until all ranks have all of their experts, nothing is dropped that only one rank has, so a group that breaks
meanwhile has lost no more than the rank that is gone.

Driven by the model, on every rank of the group after the same steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from eagleray.errors import EagleRayError
from eagleray.kernels.backend import KernelBackend
from eagleray.kernels.expert_slots import ABSENT, LayerExpertSlots, Slots
from eagleray.log import get_logger
from eagleray.models.layers.layer import storage_of
from eagleray.models.moe.expert_placement import Move, balance, find_moves, find_sources, place_anew, rank_loads
from eagleray.models.moe.experts import MoeBlock
from eagleray.models.moe.layout import ExpertLayout
from eagleray.models.weights import Weights
from eagleray.process.host_memory import host_free_bytes

logger = get_logger(__name__)


class Rebalancer:
    """`blocks` are the stage's layers with experts, in order. `interval` is in steps; None: experts move only when a
    group is formed. `open_weights` opens the checkpoint; `open_any_weights` opens weights of the same format with any
    contents, of which added expert slots are made."""

    def __init__(
        self,
        *,
        blocks: Sequence[MoeBlock],
        layout: ExpertLayout,
        interval: int | None,
        kernels: KernelBackend,
        open_weights: Callable[[], AbstractContextManager[Weights]],
        open_any_weights: Callable[[], AbstractContextManager[Weights]],
    ) -> None:
        self.num_moved = 0
        """Experts that this rank has received from others."""
        self.bytes_moved = 0
        """Bytes of the weights of these experts."""
        self._blocks = blocks
        self._layout = layout
        self._group = layout.group
        self._trace = layout.trace
        self._interval = interval
        self._kernels = kernels
        self._open_weights = open_weights
        self._open_any_weights = open_any_weights
        self._num_steps = 0
        self._seen = layout.trace.counts.clone()
        self._is_partly_empty = False
        """Whether ranks of the group are about to leave it and have no experts."""
        self._unread: list[tuple[MoeBlock, int, int]] = []
        """Experts (layer, own expert slot, expert) that are to be read when the memory of weights is awake."""

    @property
    def _layers(self) -> list[tuple[MoeBlock, LayerExpertSlots]]:
        return [(block, block.slots) for block in self._blocks if block.slots is not None]

    def step(self, *, may_move: bool = True) -> None:
        """Count a step, and move experts if it is time to and `may_move` is true on all ranks of the group."""
        if self._interval is None or self._is_partly_empty or not self._blocks:
            return
        self._num_steps += 1
        if self._num_steps % self._interval == 0 and self._may_all_move(may_move):
            self._rebalance()

    def allocate(self) -> None:
        """Make the expert slots of a rank that has loaded no experts."""
        with self._open_any_weights() as weights:
            for block, slots in self._layers:
                block.resize(slots.slots_per_rank, weights)

    def on_group_formed(self, *, leaving: Collection[int] = (), has_memory: bool = True) -> str | None:
        """Place the experts in a new group, of which the ranks in `leaving` get none, and bring them to their ranks.
        Without `has_memory` on all ranks, because weights sleep, missing ones are read by `read_missing`.

        If a rank has too little memory for the experts of those that leave, they keep them, and that rank returns what
        it lacks.
        """
        began = time.monotonic()
        self._num_steps = 0
        if not self._blocks:
            self._seen = self._trace.counts.clone()
            return None
        group, layers = self._group, self._layers
        load = self._on_host(group.all_reduce(self._trace.counts.clone())).numpy()  # [num_layers, num_experts]
        present, may_move = self._gather_experts(layers, has_memory=has_memory)
        stays = group.rank not in leaving
        per_rank = self._layout.slots_per_rank(group.size - len(leaving))
        shortage = self._find_shortage(per_rank) if leaving and stays else None
        if (
            leaving
            and self._on_host(group.all_reduce(torch.full_like(self._seen[:1, :1], shortage is not None))).item()
        ):
            leaving, stays, per_rank = (), True, self._layout.slots_per_rank(group.size)
        placed: list[Slots] = []
        lost: list[tuple[MoeBlock, int, int]] = []
        num_received = self.num_moved
        with self._open_any_weights() as any_weights:
            for (block, slots), experts, tokens in zip(layers, present, load, strict=True):
                new = place_anew(experts, tokens, per_rank, leaving=leaving)
                moves, missing = find_sources(experts, new)
                if not may_move:
                    missing += [move.target for move in moves]
                    moves = []
                here = [target for target in missing if target // per_rank == group.rank]
                lost += [(block, target % per_rank, int(new[target])) for target in here]
                if stays and len(slots.local_experts) < per_rank:
                    self._check_memory(may_move)
                    block.resize(per_rank, any_weights)
                if moves:
                    self._exchange(block, moves, source_width=experts.shape[1], target_width=per_rank)
                for move in moves:
                    if move.target // per_rank == group.rank:
                        slots.local_experts[move.target % per_rank] = move.expert
                placed.append(new)
            self._restore(lost, now=may_move)
            self._on_host(group.all_reduce(torch.zeros_like(self._seen[:1, :1])))
            # From here on every rank has all of its experts.
            for block, slots in layers:
                if stays and len(slots.local_experts) > per_rank:
                    self._check_memory(may_move)
                    block.resize(per_rank, any_weights)
        held = [slots.local_experts for _, slots in layers]
        self._layout.set_slots(placed)
        for (_, slots), own in zip(self._layers, held, strict=True):
            slots.local_experts = own  # a leaving rank still has its experts, in case that another one exits
        self._is_partly_empty = bool(leaving)
        self._seen = self._trace.counts.clone()
        seconds = time.monotonic() - began
        if (num_received := self.num_moved - num_received) or lost:
            logger.info("received %d experts and read %d, in %.2f s", num_received, len(lost), seconds)
        return shortage

    def read_missing(self) -> None:
        """Read the experts that could not be read while the memory of weights was asleep."""

        def is_present(block: MoeBlock, slot: int, expert: int) -> bool:  # the slot may have another one, or be gone
            return block.slots is not None and expert in block.slots.local_experts[slot : slot + 1]

        self._restore([one for one in self._unread if is_present(*one)])
        self._unread = []

    def _find_shortage(self, per_rank: int) -> str | None:
        """Return what this rank lacks to have that many expert slots in every layer, or None."""
        sizes = [(sum(map(len, block.products.storage(0))), len(slots.local_experts)) for block, slots in self._layers]
        needed = sum(size * max(0, per_rank - present) for size, present in sizes)
        # A layer may be packed anew as a whole before its former memory is free.
        working = max(size * per_rank for size, _ in sizes) if needed else 0
        free = _free_bytes(self._seen.device, num_ranks=self._group.size)
        if needed + working <= free:
            return None
        return (
            f"the experts of engines that leave need {(needed + working) / 2**30:.2f} GiB in each worker that stays, "
            f"which may take {free / 2**30:.2f} GiB"
        )

    def _gather_experts(
        self, layers: Sequence[tuple[MoeBlock, LayerExpertSlots]], *, has_memory: bool
    ) -> tuple[list[Slots], bool]:
        """Return the experts that every rank has, [num_ranks, width] for each layer with -1 for empty slots, and
        whether all ranks have memory for weights."""
        size, device = self._group.size, self._seen.device
        own = [slots.local_experts for _, slots in layers]
        width = max(map(len, own))
        own_facts = torch.tensor([[width, int(has_memory)]], device=device)
        facts = self._on_host(self._group.all_gather(own_facts, [1] * size))
        width = int(facts[:, 0].max())
        padded = torch.tensor([experts + [ABSENT] * (width - len(experts)) for experts in own], device=device)
        gathered = self._on_host(self._group.all_gather(padded.T.contiguous(), [width] * size)).numpy()
        return list(gathered.T.reshape(len(layers), size, width)), bool(facts[:, 1].min())

    def _on_host(self, result: Tensor) -> Tensor:
        """Return the result of an operation of the group, which may break until it has arrived."""
        self._group.wait_until_done()
        return result.cpu()

    @staticmethod
    def _check_memory(has_memory: bool) -> None:
        if not has_memory:
            raise EagleRayError("the number of expert slots cannot change while the weights sleep: wake them first")

    def _may_all_move(self, may_move: bool) -> bool:
        """Whether `may_move` is true on all ranks. It may differ: ranks open and close updates in different steps."""
        num_that_keep = torch.tensor([int(not may_move)], dtype=self._seen.dtype, device=self._seen.device)
        return int(self._on_host(self._group.all_reduce(num_that_keep)).item()) == 0

    def _rebalance(self) -> None:
        load = self._on_host(
            self._group.all_reduce(self._trace.counts - self._seen)
        ).numpy()  # [num_layers, num_experts]
        self._seen = self._trace.counts.clone()
        size, before, after, num_moves = self._group.size, 0.0, 0.0, 0
        for (block, slots), tokens in zip(self._layers, load, strict=True):
            old = slots.experts
            new = balance(tokens, len(old), size, old)
            needed = find_moves(old, new)
            if needed:
                width = slots.slots_per_rank
                self._exchange(block, needed, source_width=width, target_width=width)
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

    def _exchange(self, block: MoeBlock, needed: Sequence[Move], *, source_width: int, target_width: int) -> None:
        """Copy the weights to their new expert slots. All are read before any is written, and all have arrived: if the
        group breaks, the slots keep what they have. The widths are the numbers of slots of each rank by which sources
        and targets are counted."""
        rank, size = self._group.rank, self._group.size
        ends = [(move, move.source // source_width, move.target // target_width) for move in needed]
        sent = [(move, target) for move, source, target in ends if source == rank and target != rank]
        received = [(move, source) for move, source, target in ends if target == rank and source != rank]
        received.sort(key=lambda each: each[1])  # each rank sends them in order of the target
        here = [move for move, source, target in ends if source == target == rank]

        copies = [_read(block, move.source % source_width) for move in here]
        rows = torch.stack([_read(block, slot) for slot in [move.source % source_width for move, _ in sent] or [0]])
        rows = rows[: len(sent)]  # also with nothing to send, a row has the bytes of an expert
        send_counts = [sum(target == other for _, target in sent) for other in range(size)]
        receive_counts = [sum(source == other for _, source in received) for other in range(size)]
        arrived = self._group.all_to_all(rows, send_counts, receive_counts)
        self._group.wait_until_done()
        for move, weights in zip([*here, *(move for move, _ in received)], [*copies, *arrived], strict=True):
            _write(block, move.target % target_width, weights)
        self.num_moved += len(received)
        self.bytes_moved += arrived.numel()

    def _restore(self, lost: Sequence[tuple[MoeBlock, int, int]], *, now: bool = True) -> None:
        """Read the weights of experts (layer, own expert slot, expert) from the checkpoint, at once or by
        `read_missing`."""
        if not lost:
            return
        if not now:
            self._unread += lost
        else:
            logger.info("reading %d experts again that were lost with another rank", len(lost))
            with self._open_weights() as weights:
                for block, slot, expert in lost:
                    made = block.expert(expert).make(weights, self._kernels)
                    _write(block, slot, torch.cat(storage_of(made)))
        for block, slot, expert in lost:
            assert block.slots is not None
            block.slots.local_experts[slot] = expert


def _free_bytes(device: torch.device, *, num_ranks: int) -> int:
    """Return the memory that this rank may take, if all `num_ranks` ranks of a CPU share this host."""
    if device.type != "cuda":
        return host_free_bytes() // num_ranks
    free: int = torch.cuda.mem_get_info(device)[0]
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def _read(block: MoeBlock, slot: int) -> Tensor:
    """Return a copy of the weights in this rank's expert slot, uint8 [bytes]."""
    return torch.cat(block.products.storage(slot))


def _write(block: MoeBlock, slot: int, weights: Tensor) -> None:
    parts = block.products.storage(slot)
    for memory, part in zip(parts, weights.split([len(memory) for memory in parts]), strict=True):
        memory.copy_(part)
