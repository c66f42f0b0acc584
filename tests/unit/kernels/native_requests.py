"""Requests and their batches for tests of the CPU's attention over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagleray.kernels.cpu.abi import CStruct, abi


@dataclass
class Request:
    """The features of all tokens of a request, of which `done` have been computed."""

    features: Tensor
    blocks: list[int]
    done: int = 0

    def slots(self, block_size: int) -> Tensor:
        """Return the slots of the computed tokens."""
        positions = torch.arange(self.done)
        return torch.tensor(self.blocks)[positions // block_size] * block_size + positions % block_size


def shuffled_blocks(sizes: Sequence[int], block_size: int) -> tuple[list[list[int]], int]:
    """Return the blocks of requests of these sizes, in random order, and the number of all blocks: two are unused."""
    counts = [-(-size // block_size) for size in sizes]
    shuffled = torch.randperm(sum(counts) + 2).tolist()
    return [[shuffled.pop() for _ in range(count)] for count in counts], sum(counts) + 2


class Batch:
    """A step that computes the next tokens of some requests."""

    def __init__(self, work: Sequence[tuple[Request, int]], block_size: int) -> None:
        self.work = work
        self.counts = [count for _, count in work]
        spans = [range(request.done, request.done + count) for request, count in work]
        self.features = torch.cat(
            [request.features[span.start : span.stop] for (request, _), span in zip(work, spans, strict=True)]
        )
        table = torch.zeros(len(work), max(len(request.blocks) for request, _ in work), dtype=torch.int32)
        for row, (request, _) in enumerate(work):
            table[row, : len(request.blocks)] = torch.tensor(request.blocks)
        slots = [
            request.blocks[p // block_size] * block_size + p % block_size
            for (request, _), span in zip(work, spans, strict=True)
            for p in span
        ]
        starts = torch.tensor([0, *self.counts]).cumsum(0).int()
        positions = [p for span in spans for p in span]
        integers = [starts, *(torch.tensor(x).int() for x in ([span.stop for span in spans], positions, slots)), table]
        self._integers = integers  # the struct points to them
        self.metadata: CStruct = abi.CAttentionMetadata(
            num_rows=len(work),
            num_tokens=len(slots),
            query_start_loc=starts.data_ptr(),
            seq_lens=integers[1].data_ptr(),
            block_table=table.data_ptr(),
            table_stride=table.shape[1],
            positions=integers[2].data_ptr(),
            slot_mapping=integers[3].data_ptr(),
        )

    def finish(self, out: Tensor) -> list[Tensor]:
        """Mark the tokens as computed, and return each request's part of `out`."""
        for request, count in self.work:
            request.done += count
        return list(out.split(self.counts))


def last_tokens(requests: Sequence[Request], counts: Sequence[int]) -> list[tuple[Request, int]]:
    """Return the work of computing the last `counts` tokens, as if those before them had been computed."""
    for request, count in zip(requests, counts, strict=True):
        request.done = len(request.features) - count
    return list(zip(requests, counts, strict=True))


def error(result: Tensor, truth: Tensor) -> float:
    return float((result.double() - truth).square().mean().sqrt())
