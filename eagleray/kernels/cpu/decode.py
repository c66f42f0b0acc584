"""Decode steps by one native call: the pass of one token of each row, the head, and the choice of the next tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.linear import NativeLinear
from eagleray.kernels.cpu.ranking import draw_threads, ranking_threads
from eagleray.kernels.decode_table import DecodeTable


class NativeDecoder:
    """Takes the decode steps of a program, whose pass `step` describes, with a head and a table of requests."""

    def __init__(
        self, library: ctypes.CDLL, step: CStruct, head: NativeLinear, table: DecodeTable, *, num_threads: int
    ) -> None:
        self.head = head
        self.table = table
        """Owner of the memory that `step` points to."""
        self._run = library.er_decode
        self._step = step
        self._step.table = _c_table(table)
        self._step.head = head.c_product()
        self._num_threads = num_threads
        self._capacity = 0
        self._rows: Any = None
        self._next: Any = None
        self._threads = cache(self._find_threads)

    def decode(self, rows: Sequence[int], pass_threads: int, max_context: int) -> list[int] | None:
        """See `Forward.decode`. The program has memory for that many rows and for contexts of `max_context` tokens."""
        num_rows = len(rows)
        if num_rows > self._capacity:
            self._capacity = num_rows
            self._rows, self._next = ((ctypes.c_int64 * num_rows)() for _ in range(2))
        step = self._step
        step.max_context = max_context
        step.head.y = self.head.reserve(num_rows)
        self._rows[:num_rows] = rows
        is_done = self._run(step, self._rows, num_rows, self._next, pass_threads, *self._threads(num_rows))
        return self._next[:num_rows] if is_done else None

    def _find_threads(self, num_rows: int) -> tuple[int, int, int]:
        num_logits, most = num_rows * self.head.size, self._num_threads
        return self.head.threads(num_rows), ranking_threads(num_logits, most), draw_threads(num_logits, most)


def _c_table(table: DecodeTable) -> CStruct:
    """Return the table as a struct, which points into it."""
    return abi.CDecodeTable(
        token_ids=table.token_ids.ctypes.data,
        token_stride=table.token_ids.shape[1],
        block_table=table.block_table.ctypes.data,
        table_stride=table.block_table.shape[1],
        block_size=table.block_size,
        num_tokens=table.num_tokens.ctypes.data,
        num_computed=table.num_computed.ctypes.data,
        features=table.features.ctypes.data,
        random=table.random,
        streams=table.streams.ctypes.data,
        temperature=table.temperature.ctypes.data,
        min_p=table.min_p.ctypes.data,
        top_k=table.top_k.ctypes.data,
        top_p=table.top_p.ctypes.data,
    )
