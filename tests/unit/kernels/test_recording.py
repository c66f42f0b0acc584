"""The recording of a pass, and the buffers of its values: a program over buffers computes what one over values does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eagleray.kernels.recording import (
    Access,
    AddOp,
    AllReduceOp,
    AnyOp,
    EmbedOp,
    HostOp,
    LinearOp,
    NormOp,
    Recording,
    TokenIds,
    Value,
    assign_buffers,
)
from eagleray.parallel.group import SingleRankGroup

SIZES = (4, 6)
GROUP = SingleRankGroup()
NORM_WEIGHT = torch.ones(1)


class Table:
    def __init__(self, size: int) -> None:
        self.size = size


class Weight:
    is_gated = False
    is_float32 = True

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("nothing computes in these tests")


def source_of(recording: Recording, size: int) -> Value:
    source = recording.begin(size)
    assert isinstance(source, Value)
    return source


def norm(x: Value) -> Value:
    return x.recording.append(NormOp(x=x, weight=NORM_WEIGHT, eps=0.0, out=x.another(x.size, is_float32=False)))


def linear(x: Value, size: int) -> Value:
    return x.recording.append(LinearOp(x=x, weight=Weight(size), out=x.another(size, is_float32=True)))


def host(*inputs: Value, size: int, is_sequence_sharded: bool = False) -> Value:
    recording = inputs[0].recording
    out = Value(recording, size, is_float32=True, is_sequence_sharded=is_sequence_sharded)
    return recording.append(HostOp(inputs=inputs, function=torch.clone, out=out))


def add(total: Value, x: Value) -> Value:
    return total.recording.append(AddOp(total=total, x=x, out=total.another(total.size, is_float32=total.is_float32)))


def all_reduce(x: Value) -> Value:
    return x.recording.append(AllReduceOp(x=x, group=GROUP, out=x.another(x.size, is_float32=x.is_float32)))


@st.composite
def recordings(draw: st.DrawFn) -> Recording:
    """A pass from hidden states or token ids, in which any value may be read again later unless it is consumed."""
    recording = Recording(torch.bfloat16)
    first = recording.begin(draw(st.sampled_from([None, *SIZES])))
    if isinstance(first, TokenIds):
        first = recording.append(EmbedOp(table=Table(SIZES[0]), out=Value(recording, SIZES[0], is_float32=True)))
    alive = [first]
    for _ in range(draw(st.integers(0, 14))):
        x = draw(st.sampled_from(alive))
        others = [value for value in alive if value is not x and (value.size, value.is_float32) == key(x)]
        match draw(st.sampled_from(["norm", "linear", "host", "reduce", "add"])):
            case "norm":
                out = norm(x)
            case "linear":
                out = linear(x, draw(st.sampled_from(SIZES)))
            case "host":
                out = host(x, *others[:1], size=draw(st.sampled_from(SIZES)))
            case "add" if others:
                out = add(x, draw(st.sampled_from(others)))
                alive.remove(x)
            case _:
                out = all_reduce(x)
                alive.remove(x)
        alive.append(out)
    recording.finish(draw(st.sampled_from(alive)))
    return recording


def key(value: Value) -> tuple[int, bool]:
    return value.size, value.is_float32


Content = tuple[object, ...]
"""What a value is computed from: the number of its operation, and the contents of the values that it reads."""


def interpret(recording: Recording) -> Content:
    contents: dict[Value, Content] = {}
    if recording.source is not None:
        contents[recording.source] = ("source",)
    for index, op in enumerate(recording.ops):
        contents[op.out] = (index, *(contents[value] for value in op.reads))
    return contents[recording.result]


def run_in_buffers(recording: Recording, accesses: Sequence[Access]) -> Content:
    """Run step i for operation i. What a step writes besides the operation's result is noise."""
    buffers = assign_buffers(accesses, source=recording.source, result=recording.result)
    memory: list[Content] = [("nothing",)] * len(buffers.shapes)
    number = buffers.numbers
    if recording.source is not None:
        memory[number[recording.source]] = ("source",)
    for index, (op, access) in enumerate(zip(recording.ops, accesses, strict=True)):
        content: Content = (index, *(memory[number[value]] for value in op.reads))
        for value in access.writes:
            memory[number[value]] = ("noise",)
        memory[number[op.out]] = content
        separate = [value for value in {*access.reads, *access.writes} if value not in access.replaces]
        assert len({number[value] for value in separate}) == len(separate)
        assert all(
            (buffers.shapes[number[value]].size, buffers.shapes[number[value]].is_float32) == key(value)
            for value in (*access.reads, *access.writes)
        )
    return memory[number[recording.result]]


def access_of(op: AnyOp, *, in_place: bool = True, has_scratch: bool = False) -> Access:
    replaces = {op.out: op.consumes} if in_place and op.consumes is not None else {}
    scratch = (op.out.another(op.out.size, is_float32=op.out.is_float32),) if has_scratch else ()
    return Access(op.reads, (*scratch, op.out), replaces)


@given(recordings(), st.data())
def test_assign_buffers_random_pass_computes_the_same_in_buffers(recording: Recording, data: st.DataObject) -> None:
    accesses = [
        access_of(op, in_place=data.draw(st.booleans()), has_scratch=data.draw(st.booleans())) for op in recording.ops
    ]
    assert run_in_buffers(recording, accesses) == interpret(recording)


def test_assign_buffers_chain_of_equal_shapes_uses_two_buffers() -> None:
    recording = Recording(torch.float32)
    x = source_of(recording, 4)
    for _ in range(5):
        x = linear(x, 4)
    recording.finish(x)
    buffers = assign_buffers([access_of(op) for op in recording.ops], source=recording.source, result=x)
    assert len(buffers.shapes) == 2


def test_assign_buffers_sum_in_place_is_in_the_buffer_of_the_total() -> None:
    recording = Recording(torch.float32)
    total = source_of(recording, 4)
    product = linear(total, 4)
    out = all_reduce(add(total, product))
    recording.finish(out)
    numbers = assign_buffers([access_of(op) for op in recording.ops], source=total, result=out).numbers
    assert numbers[out] == numbers[total] != numbers[product]


def test_assign_buffers_source_read_late_keeps_its_buffer() -> None:
    """No step before the first read of the source may write to its memory."""
    recording = Recording(torch.float32)
    source = source_of(recording, 4)
    table, other = Table(4), Value(recording, 4, is_float32=True)
    recording.append(EmbedOp(table=table, out=other))
    result = add(linear(linear(other, 4), 4), source)
    recording.finish(result)
    assert run_in_buffers(recording, [access_of(op) for op in recording.ops]) == interpret(recording)


def test_assign_buffers_value_read_before_it_is_written_raises() -> None:
    recording = Recording(torch.float32)
    x = source_of(recording, 4)
    with pytest.raises(AssertionError, match="none has written"):
        assign_buffers([Access(reads=(x.another(4, is_float32=True),))], source=x, result=x)


def test_assign_buffers_value_replaced_and_read_later_raises() -> None:
    recording = Recording(torch.float32)
    x = source_of(recording, 4)
    out = x.another(4, is_float32=True)
    with pytest.raises(AssertionError):
        assign_buffers([Access((x,), (out,), {out: x}), Access((x,))], source=x, result=out)


@pytest.mark.parametrize("consume", [all_reduce, lambda x: add(x, linear(x, 4))])
def test_append_read_of_a_consumed_value_raises(consume) -> None:
    recording = Recording(torch.float32)
    x = source_of(recording, 4)
    consume(x)
    with pytest.raises(AssertionError, match="consumed"):
        norm(x)


def test_append_operation_on_two_numbers_of_rows_raises() -> None:
    recording = Recording(torch.float32)
    x = source_of(recording, 4)
    shard = host(x, size=4, is_sequence_sharded=True)
    with pytest.raises(AssertionError, match="one number of rows"):
        add(x, shard)


@pytest.mark.parametrize(("dtype", "num_rounded"), [(torch.float32, 0), (torch.bfloat16, 1)])
def test_rounded_float32_value_is_rounded_to_the_models_dtype_once(dtype: torch.dtype, num_rounded: int) -> None:
    recording = Recording(dtype)
    x = source_of(recording, 4)
    rounded = recording.rounded(recording.rounded(x))
    assert len(recording.ops) == num_rounded
    assert rounded.is_float32 == (dtype == torch.float32)
