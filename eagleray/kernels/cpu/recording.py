"""Records a forward pass: what operations are applied to which rows, in order.

Layers are called once with `Value`s in the place of tensors. Where an operation can end another one, the two become one
step: what is added to the hidden state is added by the product that computes it. Values that are not needed any more
leave their buffer to later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from torch import Tensor

from eagleray.kernels.cpu.abi import ADD, CLEAR, ENDING_ADD, MIX, MULTIPLY, ROUND, RowsToRows
from eagleray.parallel.group import TensorParallelGroup


@dataclass(eq=False)
class Value:
    """Rows that some step writes. float32, or of the model's dtype."""

    recording: Recording
    size: int
    """Features."""
    is_float: bool
    is_share: bool = False
    """The rows of this rank's share, not those of all tokens."""
    buffer: int = -1
    """Its number, known when the recording is finished."""

    def another(self, size: int, *, is_float: bool) -> Value:
        """As many rows that another step writes."""
        return Value(self.recording, size, is_float, self.is_share)


@dataclass(eq=False)
class NativeOp:
    """`what`: a struct of `abi`. Its fields that name rows are in `reads` and `writes`. All are of the same number of
    rows."""

    operation: int
    what: Any
    reads: dict[str, Value]
    writes: dict[str, Value]

    @property
    def is_share(self) -> bool:
        return next(iter(self.writes.values())).is_share


@dataclass(eq=False)
class HostOp:
    """Something that Python does: `apply` takes the rows, of which it overwrites the last."""

    apply: Callable[..., None]
    rows: Sequence[Value]


@dataclass
class Recording:
    steps: list[NativeOp | HostOp] = field(default_factory=list)
    buffers: list[tuple[int, bool]] = field(default_factory=list)
    """(features, is it float32) of each."""
    reserve: list[Callable[[int], None]] = field(default_factory=list)
    """What is to be called before a pass has more tokens than any before: so many."""

    def value(self, size: int, *, is_float: bool, is_share: bool = False) -> Value:
        return Value(self, size, is_float, is_share)

    def append(self, operation: int, what: Any, *, reads: dict[str, Value], writes: dict[str, Value]) -> None:
        step = NativeOp(operation, what, reads, writes)
        assert all(value.is_share == step.is_share for value in _values(step)), "one number of rows in a step"
        self.steps.append(step)

    def add(self, total: Value, x: Value) -> Value:
        """total += x"""
        assert total.is_share == x.is_share
        last = self.steps[-1]
        if _can_end_with_sum(last, x) and last.operation == MULTIPLY:
            last.what.ending = ENDING_ADD
            last.writes = {"out": total}
            last.reads["total"] = total
        elif _can_end_with_sum(last, x) and last.operation == MIX:
            cleared = self.steps.pop(-2)
            assert isinstance(cleared, NativeOp) and cleared.writes.get("out") is x
            last.writes = {"hidden": total}
            last.reads["total"] = total
        else:
            what = RowsToRows(size=x.size)
            self.append(ADD, what, reads={"x": x, "total": total}, writes={"out": total})
        return total

    def clear(self, x: Value) -> None:
        self.append(CLEAR, RowsToRows(size=x.size), reads={}, writes={"out": x})

    def rounded(self, x: Value) -> Value:
        """`x` in the model's dtype, as products take it."""
        if not x.is_float:
            return x
        out = x.another(x.size, is_float=False)
        self.append(ROUND, RowsToRows(size=x.size), reads={"x": x}, writes={"out": out})
        return out

    def all_reduce(self, x: Value, group: TensorParallelGroup) -> Value:
        def reduce(rows: Tensor) -> None:
            total = group.all_reduce(rows)
            if total.data_ptr() != rows.data_ptr():
                rows.copy_(total)

        self.steps.append(HostOp(reduce, [x]))
        return x

    def host(self, function: Callable[..., Tensor], inputs: Sequence[Value], *, size: int, is_share: bool) -> Value:
        """See `Kernels.host`."""
        out = self.value(size, is_float=True, is_share=is_share)

        def compute(*rows: Tensor) -> None:
            rows[-1].copy_(function(*rows[:-1]))

        self.steps.append(HostOp(compute, [*inputs, out]))
        return out

    def finish(self, result: Value) -> None:
        """Give every value a buffer, and name it in the steps. `result` is not overwritten by any of them."""
        last_use: dict[Value, int] = {}
        for index, step in enumerate(self.steps):
            for value in _values(step):
                last_use[value] = index
        last_use[result] = len(self.steps)
        free: dict[tuple[int, bool], list[int]] = {}
        for index, step in enumerate(self.steps):
            values = _values(step)
            for value in values:
                if value.buffer < 0:
                    value.buffer = self._take(value, free)
            if isinstance(step, NativeOp):
                for name, value in (step.reads | step.writes).items():
                    if name != "total":
                        setattr(step.what, name, value.buffer)
            for value in set(values):
                if last_use[value] == index:
                    free.setdefault((value.size, value.is_float), []).append(value.buffer)

    def _take(self, value: Value, free: dict[tuple[int, bool], list[int]]) -> int:
        key = (value.size, value.is_float)
        if free.get(key):
            return free[key].pop()
        self.buffers.append(key)
        return len(self.buffers) - 1


def _can_end_with_sum(step: NativeOp | HostOp, x: Value) -> TypeGuard[NativeOp]:
    """Whether it writes `x` and could add it to something instead; a step that adds already can add to nothing else."""
    return isinstance(step, NativeOp) and x in step.writes.values() and "total" not in step.reads


def _values(step: NativeOp | HostOp) -> Sequence[Value]:
    return step.rows if isinstance(step, HostOp) else [*step.reads.values(), *step.writes.values()]
