"""Records a forward pass: what operations are applied to which rows, in order.

Layers are called once with `Value`s in the place of tensors. Where an operation can end another one, the two become one
step: what is added to the hidden state is added by the product that computes it. Values that are not needed any more
leave their buffer to later ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from eagleray.models.kernels.abi import ADD, CLEAR, ENDING_ADD, ENDING_STORE, MIX, MULTIPLY, RowsToRows
from eagleray.parallel import Group

__all__ = ["HostStep", "NativeStep", "Recording", "Value"]


@dataclass(eq=False)
class Value:
    """Rows that some step writes. float32, or of the model's dtype."""

    recording: Recording
    size: int
    """Features."""
    is_float: bool
    buffer: int = -1
    """Its number, known when the recording is finished."""


@dataclass(eq=False)
class NativeStep:
    """`what`: a struct of `abi`. Its fields that name rows are in `reads` and `writes`."""

    operation: int
    what: Any
    reads: dict[str, Value]
    writes: dict[str, Value]


@dataclass(eq=False)
class HostStep:
    """Something that Python does to rows, in place."""

    apply: Callable[[Tensor], None]
    rows: Value


@dataclass
class Recording:
    steps: list[NativeStep | HostStep] = field(default_factory=list)
    buffers: list[tuple[int, bool]] = field(default_factory=list)
    """(features, is it float32) of each."""

    def value(self, size: int, *, is_float: bool) -> Value:
        return Value(self, size, is_float)

    def append(self, operation: int, what: Any, *, reads: dict[str, Value], writes: dict[str, Value]) -> None:
        self.steps.append(NativeStep(operation, what, reads, writes))

    def add(self, total: Value, x: Value) -> Value:
        """total += x"""
        last = self.steps[-1]
        if isinstance(last, NativeStep) and last.operation == MULTIPLY and last.writes.get("out") is x:
            assert last.what.ending == ENDING_STORE
            last.what.ending = ENDING_ADD
            last.writes = {"out": total}
            last.reads["total"] = total
        elif isinstance(last, NativeStep) and last.operation == MIX and last.writes.get("hidden") is x:
            cleared = self.steps.pop(-2)
            assert isinstance(cleared, NativeStep) and cleared.writes.get("out") is x
            last.writes = {"hidden": total}
            last.reads["total"] = total
        else:
            what = RowsToRows(size=x.size)
            self.append(ADD, what, reads={"x": x, "total": total}, writes={"out": total})
        return total

    def clear(self, x: Value) -> None:
        self.append(CLEAR, RowsToRows(size=x.size), reads={}, writes={"out": x})

    def all_reduce(self, x: Value, group: Group) -> Value:
        def reduce(rows: Tensor) -> None:
            total = group.all_reduce(rows)
            if total.data_ptr() != rows.data_ptr():
                rows.copy_(total)

        self.steps.append(HostStep(reduce, x))
        return x

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
            if isinstance(step, NativeStep):
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


def _values(step: NativeStep | HostStep) -> list[Value]:
    return [step.rows] if isinstance(step, HostStep) else [*step.reads.values(), *step.writes.values()]
