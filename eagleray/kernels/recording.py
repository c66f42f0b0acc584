"""The recording of a forward pass: the operations that layers apply to hidden states, and the values between them.

Layers are called once with `Value`s in place of tensors (see `RecordingBackend`). A recording says what is computed, in
order and without fusions, for any device. The lowering of a backend turns it into a program: it merges operations and
makes steps for its device of them, and finally assigns a buffer to each value that a step reads or writes
(`assign_buffers`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from eagleray.kernels.adapters import AdapterSite
from eagleray.kernels.backend import ExpertProducts, OwnsWeights
from eagleray.kernels.expert_slots import ExpertSlotMap
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.params import AttentionParams, RouterParams
from eagleray.parallel.group import TensorParallelGroup


class LinearWeight(OwnsWeights, Protocol):
    """The weight of a product in the layout of one backend, which alone reads more than the attributes below."""

    size: int
    """Features of the product; if it is gated, of the gated result."""
    is_gated: bool
    is_float32: bool
    """Whether the product is float32, not of the model's dtype."""

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product [n, size] of `x` [n, in_features] at once. The next call may overwrite it."""
        ...


class EmbeddingTable(OwnsWeights, Protocol):
    """The vectors of a vocabulary, or of this rank's part of it, in the layout of one backend."""

    size: int


class MLAWeights(OwnsWeights, Protocol):
    """A multi-head latent attention in the layout of one backend."""

    @property
    def num_heads(self) -> int: ...

    @property
    def value_dim(self) -> int: ...


@dataclass(eq=False)
class Value:
    """Rows of `size` features that an operation writes once."""

    recording: Recording = field(repr=False)
    size: int
    is_float32: bool
    """Whether the features are float32, as those of the residual stream, and not of the model's dtype."""
    is_sequence_sharded: bool = False
    """Whether the rows are this rank's shard of the tokens instead of all tokens."""

    def another(self, size: int, *, is_float32: bool) -> Value:
        """Return a value with the same number of rows, for an operation to write."""
        return Value(self.recording, size, is_float32, self.is_sequence_sharded)


@dataclass(eq=False)
class TokenIds:
    """Placeholder for the batch's token ids."""

    recording: Recording


@dataclass(eq=False, kw_only=True)
class RecordedOp(ABC):
    """An operation. It writes one value, `out`; all values that it reads have the same number of rows."""

    out: Value

    @property
    @abstractmethod
    def reads(self) -> Sequence[Value]: ...

    @property
    def consumes(self) -> Value | None:
        """The value that no later operation reads, so `out` may be computed in its buffer."""
        return None


@dataclass(eq=False, kw_only=True)
class EmbedOp(RecordedOp):
    """Look up the batch's token ids; tokens that the table does not have get zeros."""

    table: EmbeddingTable

    @property
    def reads(self) -> Sequence[Value]:
        return ()


@dataclass(eq=False, kw_only=True)
class RoundOp(RecordedOp):
    """Round float32 to the model's dtype."""

    x: Value

    @property
    def reads(self) -> Sequence[Value]:
        return (self.x,)


@dataclass(eq=False, kw_only=True)
class LinearOp(RecordedOp):
    """A product, see `KernelBackend.linear` and `gated_linear`. `x` is of the model's dtype."""

    x: Value
    weight: LinearWeight
    adapters: AdapterSite | None = None
    """The adapters that are added to the product, see `KernelBackend.adapt`."""

    @property
    def reads(self) -> Sequence[Value]:
        return (self.x,)


@dataclass(eq=False, kw_only=True)
class NormOp(RecordedOp):
    """An RMS norm, see `KernelBackend.norm`. `weight` is float32 [size]."""

    x: Value
    weight: Tensor
    eps: float

    @property
    def reads(self) -> Sequence[Value]:
        return (self.x,)


@dataclass(eq=False, kw_only=True)
class AttentionOp(RecordedOp):
    """An attention, see `KernelBackend.self_attention`. The weights in `params` are float32."""

    qkv: Value
    params: AttentionParams
    cache: Tensor
    block_size: int

    @property
    def reads(self) -> Sequence[Value]:
        return (self.qkv,)


@dataclass(eq=False, kw_only=True)
class MLAAttentionOp(RecordedOp):
    """A multi-head latent attention, see `KernelBackend.mla_attention`."""

    queries: Value
    latents: Value
    weights: MLAWeights
    cache: Tensor
    block_size: int

    @property
    def reads(self) -> Sequence[Value]:
        return self.queries, self.latents


@dataclass(eq=False, kw_only=True)
class ExpertsOp(RecordedOp):
    """The choice of experts and the weighted sum of their outputs, see `KernelBackend.experts`. `x` is of the model's
    dtype."""

    x: Value
    scores: Value
    products: ExpertProducts
    router: RouterParams
    slots: ExpertSlotMap | None
    trace: ExpertTrace | None
    layer: int

    @property
    def reads(self) -> Sequence[Value]:
        return self.x, self.scores


@dataclass(eq=False, kw_only=True)
class AddOp(RecordedOp):
    """The sum of `total`, which it consumes, and `x`."""

    total: Value
    x: Value

    @property
    def reads(self) -> Sequence[Value]:
        return self.total, self.x

    @property
    def consumes(self) -> Value | None:
        return self.total


@dataclass(eq=False, kw_only=True)
class AllReduceOp(RecordedOp):
    """The sum of `x`, which it consumes, over the ranks of `group`."""

    x: Value
    group: TensorParallelGroup

    @property
    def reads(self) -> Sequence[Value]:
        return (self.x,)

    @property
    def consumes(self) -> Value | None:
        return self.x


@dataclass(eq=False, kw_only=True)
class HostOp(RecordedOp):
    """A Python function, see `KernelBackend.host`. Its inputs and its result may have different numbers of rows."""

    inputs: Sequence[Value]
    function: Callable[..., Tensor]

    @property
    def reads(self) -> Sequence[Value]:
        return self.inputs


AnyOp = EmbedOp | RoundOp | LinearOp | NormOp | AttentionOp | MLAAttentionOp | ExpertsOp | AddOp | AllReduceOp | HostOp


@dataclass(eq=False)
class Recording:
    """The operations of a pass in a model of `dtype`. `source` are the hidden states that the pass begins with, if it
    does not begin with token ids; `result` is what it returns, set when all is recorded."""

    dtype: torch.dtype
    ops: list[AnyOp] = field(default_factory=list)
    source: Value | None = None
    _result: Value | None = None
    _consumed: set[Value] = field(default_factory=set)

    @property
    def result(self) -> Value:
        assert self._result is not None, "the recording is not finished"
        return self._result

    def begin(self, size: int | None) -> Value | TokenIds:
        """Return the input of the pass: hidden states of `size` features, or the token ids if it is None."""
        if size is None:
            return TokenIds(self)
        self.source = Value(self, size, is_float32=True)
        return self.source

    def finish(self, result: Value) -> None:
        self._result = result

    def append(self, op: AnyOp) -> Value:
        """Record an operation, and return its result."""
        assert self._consumed.isdisjoint(op.reads), "an operation reads a value that another one has consumed"
        rows = {value.is_sequence_sharded for value in (*op.reads, op.out)}
        assert isinstance(op, HostOp) or len(rows) == 1, "an operation has one number of rows"
        if op.consumes is not None:
            self._consumed.add(op.consumes)
        self.ops.append(op)
        return op.out

    def rounded(self, x: Value) -> Value:
        """Return `x` in the model's dtype."""
        if not x.is_float32 or self.dtype == torch.float32:
            return x
        return self.append(RoundOp(x=x, out=x.another(x.size, is_float32=False)))


@dataclass(frozen=True, slots=True)
class BufferShape:
    """The features of a buffer and their dtype, see `Value`."""

    size: int
    is_float32: bool

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if self.is_float32 else model_dtype


@dataclass(frozen=True, slots=True)
class Access:
    """The values that a step of a program reads and writes, each of the written ones for the first time."""

    reads: Sequence[Value] = ()
    writes: Sequence[Value] = ()
    replaces: Mapping[Value, Value] = field(default_factory=dict)
    """Read value by the written value that is computed in its buffer. No later step reads it."""


@dataclass(frozen=True, slots=True)
class Buffers:
    """The buffers of a program: `shapes`, and the number of each value's buffer."""

    shapes: Sequence[BufferShape]
    numbers: Mapping[Value, int]


def assign_buffers(accesses: Sequence[Access], *, source: Value | None, result: Value) -> Buffers:
    """Assign a buffer to every value of a program such that no step overwrites a value that is still to be read.

    `source` is written before the first step and `result` read after the last one. A step's values are all in different
    buffers, apart from those in `Access.replaces`. A buffer is used again for values of its shape.
    """
    last_use = {value: step for step, access in enumerate(accesses) for value in (*access.reads, *access.writes)}
    last_use[result] = len(accesses)
    shapes: list[BufferShape] = []
    numbers: dict[Value, int] = {}
    free: dict[BufferShape, list[int]] = defaultdict(list)

    def allocate(value: Value) -> None:
        shape = BufferShape(value.size, value.is_float32)
        if not free[shape]:
            free[shape].append(len(shapes))
            shapes.append(shape)
        numbers[value] = free[shape].pop()

    if source is not None:
        allocate(source)
    for step, access in enumerate(accesses):
        assert all(value in numbers for value in access.reads), "a step reads a value that none has written"
        assert all(value not in numbers for value in access.writes), "a value is written once"
        for written, replaced in access.replaces.items():
            assert last_use[replaced] == step and replaced in access.reads and written in access.writes
            assert (replaced.size, replaced.is_float32) == (written.size, written.is_float32)
            numbers[written] = numbers[replaced]
        for value in access.writes:
            if value not in numbers:
                allocate(value)
        kept = set(access.replaces.values())
        for value in dict.fromkeys((*access.reads, *access.writes)):
            if last_use[value] == step and value not in kept:
                free[shapes[numbers[value]]].append(numbers[value])
    return Buffers(shapes, numbers)
