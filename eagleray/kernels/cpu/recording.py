"""The recording of a forward pass: the operations and the rows they read and write, in order.

Layers are called once with `Value`s in place of tensors. An addition that follows a product or the experts is
merged into it, so that its result is added to the hidden state as it is written. Later values reuse the buffers of
values that no further op reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor

from eagleray.kernels.cpu.abi import abi
from eagleray.parallel.group import TensorParallelGroup


@dataclass(eq=False)
class Value:
    """Rows that an op writes, in float32 or the model's dtype."""

    recording: Recording
    size: int
    """Features."""
    is_float: bool
    is_sequence_sharded: bool = False
    """Whether the rows are this rank's shard of the tokens instead of all tokens."""
    buffer: int = -1
    """Number of the buffer, assigned when the recording is finished."""

    def another(self, size: int, *, is_float: bool) -> Value:
        """Return a value with the same number of rows, for another op to write."""
        return Value(self.recording, size, is_float, self.is_sequence_sharded)


@dataclass(eq=False)
class NativeOp:
    """An operation of the kernels. `args` is its struct of `abi`; `reads` and `writes` are the values of those fields
    of `args` that name buffers. All have the same number of rows."""

    operation: int
    args: Any
    reads: dict[str, Value]
    writes: dict[str, Value]

    @property
    def is_sequence_sharded(self) -> bool:
        return next(iter(self.writes.values())).is_sequence_sharded


@dataclass(eq=False)
class HostOp:
    """An operation in Python. `apply` takes the tensors of `rows` and overwrites the last one."""

    apply: Callable[..., None]
    rows: Sequence[Value]


@dataclass
class Recording:
    ops: list[NativeOp | HostOp] = field(default_factory=list)
    buffers: list[tuple[int, bool]] = field(default_factory=list)
    """(features, whether float32) of each buffer"""
    reserve: list[Callable[[int], None]] = field(default_factory=list)
    """Callbacks that grow buffers; called with the token count before a pass larger than every earlier one."""

    def value(self, size: int, *, is_float: bool, is_sequence_sharded: bool = False) -> Value:
        return Value(self, size, is_float, is_sequence_sharded)

    def append(self, operation: int, args: Any, *, reads: dict[str, Value], writes: dict[str, Value]) -> None:
        op = NativeOp(operation, args, reads, writes)
        is_uniform = all(value.is_sequence_sharded == op.is_sequence_sharded for value in _values(op))
        assert is_uniform, "an op has one number of rows"
        self.ops.append(op)

    def add(self, total: Value, x: Value) -> Value:
        """Add `x` to `total` in place, by the op that writes `x` if possible."""
        assert total.is_sequence_sharded == x.is_sequence_sharded
        last = self.ops[-1]
        if _can_end_with_sum(last, x) and last.operation == abi.OP_MULTIPLY:
            last.args.epilogue = abi.EPILOGUE_ADD
            last.writes = {"out": total}
            last.reads["total"] = total
        elif _can_end_with_sum(last, x) and last.operation == abi.OP_COMPUTE_EXPERTS:
            cleared = self.ops.pop(-2)
            assert isinstance(cleared, NativeOp) and cleared.writes.get("out") is x
            last.writes = {"hidden": total}
            last.reads["total"] = total
        else:
            args = abi.CElementwise(size=x.size)
            self.append(abi.OP_ADD, args, reads={"x": x, "total": total}, writes={"out": total})
        return total

    def clear(self, x: Value) -> None:
        self.append(abi.OP_CLEAR, abi.CElementwise(size=x.size), reads={}, writes={"out": x})

    def rounded(self, x: Value) -> Value:
        """Return `x` in the model's dtype, which products require."""
        if not x.is_float:
            return x
        out = x.another(x.size, is_float=False)
        self.append(abi.OP_ROUND, abi.CElementwise(size=x.size), reads={"x": x}, writes={"out": out})
        return out

    def all_reduce(self, x: Value, group: TensorParallelGroup) -> Value:
        def reduce(rows: Tensor) -> None:
            total = group.all_reduce(rows)
            if total.data_ptr() != rows.data_ptr():
                rows.copy_(total)

        self.ops.append(HostOp(reduce, [x]))
        return x

    def host(
        self, function: Callable[..., Tensor], inputs: Sequence[Value], *, size: int, is_sequence_sharded: bool
    ) -> Value:
        """See `KernelBackend.host`."""
        out = self.value(size, is_float=True, is_sequence_sharded=is_sequence_sharded)

        def compute(*rows: Tensor) -> None:
            rows[-1].copy_(function(*rows[:-1]))

        self.ops.append(HostOp(compute, [*inputs, out]))
        return out

    def finish(self, result: Value) -> None:
        """Assign a buffer to every value and write its number to the ops. No op overwrites the buffer of `result`."""
        last_use: dict[Value, int] = {}
        for index, op in enumerate(self.ops):
            for value in _values(op):
                last_use[value] = index
        last_use[result] = len(self.ops)
        free: dict[tuple[int, bool], list[int]] = {}
        for index, op in enumerate(self.ops):
            values = _values(op)
            for value in values:
                if value.buffer < 0:
                    value.buffer = self._allocate(value, free)
            if isinstance(op, NativeOp):
                for name, value in (op.reads | op.writes).items():
                    if name != "total":
                        setattr(op.args, name, value.buffer)
            for value in set(values):
                if last_use[value] == index:
                    free.setdefault((value.size, value.is_float), []).append(value.buffer)

    def _allocate(self, value: Value, free: dict[tuple[int, bool], list[int]]) -> int:
        key = (value.size, value.is_float)
        if free.get(key):
            return free[key].pop()
        self.buffers.append(key)
        return len(self.buffers) - 1


def _can_end_with_sum(op: NativeOp | HostOp, x: Value) -> TypeGuard[NativeOp]:
    """Whether `op` writes `x` and could add it to another value instead. An op adds at most once."""
    return isinstance(op, NativeOp) and x in op.writes.values() and "total" not in op.reads


def _values(op: NativeOp | HostOp) -> Sequence[Value]:
    return op.rows if isinstance(op, HostOp) else [*op.reads.values(), *op.writes.values()]
