"""The results of both kinds of tensor-parallel groups, for operations in any order and of any size."""

from __future__ import annotations

import os
from functools import partial

import msgspec
import pytest
import torch
from group_kinds import BUFFER_BYTES, KINDS, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together

from eagleray.errors import ChannelClosed, ConfigError, DeadlineExceeded
from eagleray.parallel.distributed import TorchProcessGroups
from eagleray.parallel.group import SingleRankGroup
from eagleray.parallel.rendezvous import bind_store, reach_store
from eagleray.parallel.shared_memory import Segment, SegmentHandle

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64]


@pytest.fixture(scope="module", params=[(kind, size) for kind in KINDS for size in (2, 3, 4)], ids=str)
def groups(request):
    made = make_groups(*request.param)
    yield made
    for group in made:
        group.close()


def make_input(shape: tuple[int, ...], dtype: torch.dtype, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def expected_sum(inputs: list[torch.Tensor]) -> torch.Tensor:
    exact = torch.float32 if inputs[0].dtype.is_floating_point else torch.int64
    total = inputs[0].to(exact)
    for x in inputs[1:]:
        total = total + x.to(exact)
    return total.to(inputs[0].dtype)


OPERATION = st.tuples(
    st.sampled_from(["all_reduce", "gather", "broadcast"]),
    st.sampled_from([(1,), (1, 1), (3, 7), (1, 1024), (2, 1025), (5, 511), (3000,), (40, 130), (2, 2500), (0, 4)]),
    st.sampled_from(DTYPES),
)


@settings(max_examples=25)
@given(operations=st.lists(OPERATION, min_size=1, max_size=12))
def test_group_any_operations_in_any_order(groups, operations):
    """Shapes are smaller and larger than a buffer. Ranks do not wait for each other between operations."""

    def work(group):
        results = []
        for operation, shape, dtype in operations:
            result = getattr(group, operation)(make_input(shape, dtype, group.rank))
            results.append(None if result is None else result.clone())
        return results

    by_rank = together([partial(work, group) for group in groups])
    for number, (operation, shape, dtype) in enumerate(operations):
        results = [results[number] for results in by_rank]
        inputs = [make_input(shape, dtype, rank) for rank in range(len(groups))]
        if operation == "gather":
            assert torch.equal(results[0], torch.cat(inputs, dim=-1))
            assert all(result is None for result in results[1:])
        elif operation == "broadcast":
            assert all(torch.equal(result, inputs[0]) for result in results)
        else:
            assert all(torch.equal(result, results[0]) for result in results), "the same bits on every rank"
            assert (results[0].shape, results[0].dtype) == (shape, dtype)
            tolerance = {"atol": 1e-3, "rtol": torch.finfo(dtype).eps} if dtype.is_floating_point else {}
            torch.testing.assert_close(results[0], expected_sum(inputs), **({"atol": 0, "rtol": 0} | tolerance))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_all_reduce_half_precision_is_rounded_once(groups, dtype):
    """The sum is 256 plus small numbers, none of which alone would change it."""
    parts = [256.0 if dtype == torch.bfloat16 else 2048.0] + [0.75] * (len(groups) - 1)
    results = together(
        [lambda group=group: group.all_reduce(torch.full((5,), parts[group.rank]).to(dtype)) for group in groups]
    )
    assert torch.equal(results[0], torch.full((5,), sum(parts)).to(dtype))


def test_group_strided_inputs_give_the_same_results(groups):
    inputs = [make_input((30, 50), torch.float32, rank).T[3:] for rank in range(len(groups))]
    sums = together([lambda group=group: group.all_reduce(inputs[group.rank].clone().T.T) for group in groups])
    gathered = together([lambda group=group: group.gather(inputs[group.rank]) for group in groups])
    shared = together([lambda group=group: group.broadcast(inputs[group.rank]) for group in groups])
    torch.testing.assert_close(sums[1], sum(inputs))
    assert torch.equal(gathered[0], torch.cat(inputs, dim=-1))
    assert torch.equal(shared[1], inputs[0])


def test_all_reduce_inside_and_outside_of_inference_mode(groups):
    @torch.inference_mode()
    def inside(group):
        return group.all_reduce(torch.ones(9)).tolist()

    def outside(group):
        return group.all_reduce(torch.ones(9)).tolist()

    for work in (inside, outside, inside):
        assert together([partial(work, group) for group in groups])[0] == [len(groups)] * 9


@pytest.mark.parametrize("operation", ["all_reduce", "gather", "broadcast"])
@pytest.mark.parametrize("kind", KINDS)
def test_group_missing_rank_times_out(kind, operation):
    first, second = make_groups(kind, 2, timeout=0.3)
    waits = second if operation == "broadcast" else first
    with pytest.raises(DeadlineExceeded, match=rf"{operation}: tensor-parallel rank {waits.rank} of 2 .*0.3 s"):
        getattr(waits, operation)(torch.zeros(4))
    first.close()
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_group_closed_refuses_operations(kind):
    for group in make_groups(kind, 2):
        group.close()
        group.close()
        for operation in (group.all_reduce, group.gather, group.broadcast):
            with pytest.raises(ChannelClosed, match="the group was closed"):
                operation(torch.zeros(4))


def test_torch_group_peer_left_is_noticed():
    first, second = make_groups("gloo", 2)
    second.close()
    with pytest.raises(ChannelClosed, match="all_reduce: tensor-parallel rank 0 of 2 with rank 1"):
        first.all_reduce(torch.zeros(4))


def test_torch_process_groups_missing_peer_times_out():
    store, _ = bind_store("127.0.0.1")
    options = {"host": "127.0.0.1", "device": torch.device("cpu"), "timeout": 0.3}
    with pytest.raises(DeadlineExceeded, match=r"the 2 ranks of some group were not connected within 0\.3 s"):
        TorchProcessGroups(store, "some group", rank=0, size=2, **options)


def test_reach_store_missing_store_times_out():
    store, address = bind_store("127.0.0.1")
    del store
    with pytest.raises(DeadlineExceeded, match=f"rank 0 of the engine was not reached at {address} within 0.5 s"):
        reach_store(address, timeout=0.5)


def test_bind_store_address_of_another_machine_is_refused():
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        bind_store("192.0.2.1")


def test_attach_memory_of_another_process_is_refused():
    segment = Segment.create(2, buffer_bytes=BUFFER_BYTES)
    pid, descriptor = os.getpid(), os.memfd_create("other")
    for wrong in (
        SegmentHandle(pid, segment._region.descriptor, bytes(16), BUFFER_BYTES),
        SegmentHandle(pid, segment._region.descriptor, segment._region.nonce, 2 * BUFFER_BYTES),
        SegmentHandle(pid, descriptor, segment._region.nonce, BUFFER_BYTES),
    ):
        with pytest.raises(ConfigError, match="tensor-parallel rank 1 cannot open the shared memory of rank 0"):
            Segment.attach(msgspec.msgpack.encode(wrong), rank=1, num_ranks=2)
    gone = SegmentHandle(2**22 + 1, 3, segment._region.nonce, BUFFER_BYTES)
    with pytest.raises(ChannelClosed, match="is gone, or in another container"):
        Segment.attach(msgspec.msgpack.encode(gone), rank=1, num_ranks=2)
    os.close(descriptor)
    segment.close()
    segment.close()


def test_single_rank_group_returns_its_input():
    x, group = torch.ones(3), SingleRankGroup()
    assert group.all_reduce(x) is group.gather(x) is group.broadcast(x) is x
