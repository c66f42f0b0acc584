"""The operations of ranks that have different rows, for any counts, also 0."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from group_kinds import KINDS, make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import together

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.parallel.group import SingleRankGroup

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]

COUNT = st.integers(0, 4) | st.integers(0, 40)
"""The rows of a rank. With the features below they need up to 80 buffers."""

FEATURES = st.sampled_from([(), (1,), (3,), (7, 2), (64,), (2500,), (0,)])


@pytest.fixture(scope="module", params=[(kind, size) for kind in KINDS for size in (2, 3, 4)], ids=str)
def groups(request):
    made = make_groups(*request.param)
    yield made
    for group in made:
        group.close()


def numbers(count: int, features: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn((count, *features), generator=generator) * 40).to(dtype)


@st.composite
def operations(draw, size: int):
    """Draw (name, counts [size, size], features, dtype). all_to_all uses the counts from each rank to each, the others
    the first row of them."""
    name = draw(st.sampled_from(["all_gather", "reduce_scatter", "all_to_all", "all_reduce", "gather", "broadcast"]))
    counts = draw(st.lists(st.lists(COUNT, min_size=size, max_size=size), min_size=size, max_size=size))
    return name, counts, draw(FEATURES), draw(st.sampled_from(DTYPES))


def run(group, operation):
    name, counts, features, dtype = operation
    rank, own = group.rank, counts[0]
    if name == "all_gather":
        return group.all_gather(numbers(own[rank], features, dtype, rank), own)
    if name == "reduce_scatter":
        return group.reduce_scatter(numbers(sum(own), features, dtype, rank), own)
    if name == "all_to_all":
        receive = [counts[other][rank] for other in range(group.size)]
        return group.all_to_all(numbers(sum(counts[rank]), features, dtype, rank), counts[rank], receive)
    result = getattr(group, name)(numbers(own[0] + 1, (*features, 2), dtype, rank))
    return None if result is None else result.clone()


def expected(size: int, rank: int, operation) -> torch.Tensor | None:
    name, counts, features, dtype = operation
    own = counts[0]
    if name == "all_gather":
        return torch.cat([numbers(own[other], features, dtype, other) for other in range(size)])
    if name == "reduce_scatter":
        parts = [numbers(sum(own), features, dtype, other) for other in range(size)]
        total = sum(part.float() if dtype.is_floating_point else part for part in parts[1:]) + parts[0]
        return total.to(dtype).split(own)[rank]
    if name == "all_to_all":
        sent = [numbers(sum(counts[other]), features, dtype, other).split(counts[other]) for other in range(size)]
        return torch.cat([parts[rank] for parts in sent])
    return None


@settings(max_examples=30)
@given(data=st.data())
def test_group_any_row_operations_in_any_order(groups, data):
    size = len(groups)
    planned = data.draw(st.lists(operations(size), min_size=1, max_size=8))
    results = together([lambda group=group: [run(group, operation) for operation in planned] for group in groups])
    for number, operation in enumerate(planned):
        for rank in range(size):
            wanted = expected(size, rank, operation)
            if wanted is None:
                continue
            result = results[rank][number]
            assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
            if operation[0] == "reduce_scatter" and wanted.dtype.is_floating_point:
                torch.testing.assert_close(result, wanted, atol=1e-3, rtol=torch.finfo(wanted.dtype).eps)
            else:
                assert torch.equal(result, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reduce_scatter_has_the_bits_of_all_reduce(dtype):
    groups = make_groups("shared memory", 3)
    counts = [5, 0, 37]

    def work(group):
        x = numbers(42, (130,), dtype, group.rank)
        return group.reduce_scatter(x, counts), group.all_reduce(x.clone())

    results = together([partial(work, group) for group in groups])
    for rank, (part, whole) in enumerate(results):
        assert torch.equal(part, whole.split(counts)[rank])
    for group in groups:
        group.close()


def test_group_strided_rows_give_the_same_results(groups):
    size = len(groups)
    wide = [numbers(60, (size * 2,), torch.float32, rank) for rank in range(size)]

    def work(group):
        x = wide[group.rank].T  # [2 x size, 60]
        twos = [2] * size
        return group.all_gather(x, [len(x)] * size), group.reduce_scatter(x, twos), group.all_to_all(x, twos, twos)

    results = together([partial(work, group) for group in groups])
    for rank, (gathered, scattered, exchanged) in enumerate(results):
        assert torch.equal(gathered, torch.cat([x.T for x in wide]))
        torch.testing.assert_close(scattered, sum(x.T for x in wide).split(2)[rank])
        assert torch.equal(exchanged, torch.cat([x.T.split(2)[rank] for x in wide]))


@torch.inference_mode()
def in_inference_mode(group):
    ones = torch.ones(group.size, 3)
    each = [1] * group.size
    gathered = group.all_gather(ones[:1] * group.rank, each)
    return group.all_to_all(gathered, each, each) + group.all_gather(group.reduce_scatter(ones, each), each)


def test_group_row_operations_inside_of_inference_mode(groups):
    size = len(groups)
    for rank, result in enumerate(together([partial(in_inference_mode, group) for group in groups])):
        assert (result == rank + size).all()


def test_bytes_sent_counts_the_bytes_for_others(groups):
    size = len(groups)

    def work(group):
        before = dict(group.bytes_sent)
        x, counts = torch.ones(2 * size, 5), [2] * size
        group.all_gather(x[:2], counts)
        group.reduce_scatter(x, counts)
        group.all_to_all(x, counts, counts)
        return {name: count - before.get(name, 0) for name, count in group.bytes_sent.items() if count}

    for counted in together([partial(work, group) for group in groups]):
        row = 5 * 4
        assert counted["all_gather"] == 2 * row
        assert counted["reduce_scatter"] == counted["all_to_all"] == 2 * (size - 1) * row


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_to_all"])
@pytest.mark.parametrize("kind", KINDS)
def test_group_row_operation_missing_rank_times_out(kind, operation):
    first, second = make_groups(kind, 2, timeout=0.3)
    counts = [[1, 1]] if operation != "all_to_all" else [[1, 1], [1, 1]]
    rows = 1 if operation == "all_gather" else 2
    with pytest.raises(DeadlineExceeded, match=rf"{operation}: tensor-parallel rank 0 of 2 .*0.3 s"):
        getattr(first, operation)(torch.zeros(rows, 4), *counts)
    first.close()
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_group_closed_refuses_row_operations(kind):
    for group in make_groups(kind, 2):
        group.close()
        for work in (
            lambda group=group: group.all_gather(torch.zeros(1, 4), [1, 1]),
            lambda group=group: group.reduce_scatter(torch.zeros(2, 4), [1, 1]),
            lambda group=group: group.all_to_all(torch.zeros(2, 4), [1, 1], [1, 1]),
        ):
            with pytest.raises(ChannelClosed, match="the group was closed"):
                work()


@given(counts=st.lists(COUNT, min_size=2, max_size=6))
def test_single_rank_group_returns_its_rows(counts):
    x = torch.ones(counts[0], 2)
    group, one = SingleRankGroup(), [counts[0]]
    assert group.all_gather(x, one) is group.reduce_scatter(x, one) is group.all_to_all(x, one, one) is x
    assert not any(group.bytes_sent.values())
