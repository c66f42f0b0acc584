"""Decode steps by one native call: the pass of one token of each row, the head, and the choice of the next tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from eagleray.kernels.cpu.abi import CStruct, abi
from eagleray.kernels.cpu.linear import NativeLinear
from eagleray.kernels.cpu.ranking import draw_threads, ranking_threads
from eagleray.kernels.decode_table import DecodeTable


class NativeDecoder:
    """Takes the decode steps of a program, whose pass `step` describes, with a head and a table of requests."""

    def __init__(
        self,
        library: ctypes.CDLL,
        step: CStruct,
        head: NativeLinear,
        table: DecodeTable,
        *,
        pass_threads: Callable[[int], int],
        num_threads: int,
    ) -> None:
        """`pass_threads` returns the number of threads that compute a pass of some tokens; the rest of a step takes at
        most `num_threads`."""
        self.head = head
        self.table = table
        """Owner of memory that `step` points to."""
        self._decode = library.er_decode
        self._step = step
        self._step.table = _c_table(table)
        self._step.head = head.c_product()
        self._pass_threads = pass_threads
        self._num_threads = num_threads
        self._num_rows = self._max_context = 0
        self._rows: Any = None
        self._next: Any = None

    def decode(self, rows: Sequence[int], max_context: int) -> list[int] | None:
        """See `Forward.decode`. The program has memory for that many rows, in contexts of `max_context` tokens."""
        num_rows = len(rows)
        if num_rows != self._num_rows or max_context != self._max_context:
            self._prepare(num_rows, max_context)
        self._rows[:] = rows
        if not self._decode(self._step, self._rows, num_rows, self.head.reserve(num_rows), self._next):
            return None
        token_ids: list[int] = self._next[:]
        return token_ids

    def _prepare(self, num_rows: int, max_context: int) -> None:
        """Set what is the same for all steps of `num_rows` rows."""
        self._num_rows, self._max_context = num_rows, max_context
        self._rows, self._next = (ctypes.c_int64 * num_rows)(), (ctypes.c_int64 * num_rows)()
        step, num_logits = self._step, num_rows * self.head.size
        step.max_context = max_context
        step.pass_threads = self._pass_threads(num_rows)
        step.head_threads = self.head.threads(num_rows)
        step.ranking_threads = ranking_threads(num_logits, self._num_threads)
        step.draw_threads = draw_threads(num_logits, self._num_threads)


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
