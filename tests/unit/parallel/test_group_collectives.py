"""Groups with the operations that GPUs use: rows are padded to equal counts, and small sums have a way of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from group_kinds import make_groups
from hypothesis import given, settings
from hypothesis import strategies as st
from no_host_reads import no_host_reads
from ranks import run_ranks, together, topology

from eagleray.kernels.backend import ExpertProducts
from eagleray.kernels.expert_slots import LayerExpertSlots
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.models.moe.token_dispatcher import AllGatherTokenDispatcher
from eagleray.parallel.distributed import TorchGroup
from eagleray.parallel.small_sums import MAX_SUM_BYTES, SmallSum, SymmetricSum, open_small_sum

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, 3])
def groups(request: pytest.FixtureRequest) -> Iterator[list[TorchGroup]]:
    made = make_groups("gloo", request.param, has_collectives=True)
    yield made
    for group in made:
        group.close()


def whole_numbers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small ones, whose sums are exact in any order."""
    return torch.randint(-50, 50, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@settings(max_examples=20)
@given(data=st.data())
def test_group_collectives_of_padded_rows_equal_those_of_rows(groups: list[TorchGroup], data: Any) -> None:
    size = len(groups)
    counts = data.draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    features = data.draw(st.sampled_from([(), (1,), (3, 2), (300,), (0,)]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.uint8]))
    if dtype == torch.uint8:
        features = (*features, 4)

    def work(group: TorchGroup) -> tuple[torch.Tensor, torch.Tensor]:
        own = whole_numbers((counts[group.rank], *features), group.rank, dtype)
        parts = whole_numbers((sum(counts), *features), 10 + group.rank)
        return group.all_gather(own, counts), group.reduce_scatter(parts, counts)

    results = together([partial(work, group) for group in groups])
    total = sum(whole_numbers((sum(counts), *features), 10 + rank) for rank in range(size))
    gathered = torch.cat([whole_numbers((counts[rank], *features), rank, dtype) for rank in range(size)])
    for rank, (rows, scattered) in enumerate(results):
        assert rows.dtype == dtype and torch.equal(rows, gathered)
        assert torch.equal(scattered, total.split(counts)[rank])


@pytest.mark.parametrize("has_collectives", [False, True])
def test_group_warm_up_leaves_nothing_behind(has_collectives: bool) -> None:
    groups = make_groups("gloo", 2, has_collectives=has_collectives)
    together([partial(group.warm_up, CPU) for group in groups])
    assert all(sum(group.bytes_sent.values()) == 0 for group in groups)
    sums = together([lambda group=group: group.all_reduce(torch.full((3,), float(group.rank + 1))) for group in groups])
    assert all(x.tolist() == [3.0] * 3 for x in sums)


def test_stages_warm_up_leaves_no_hidden_states_behind() -> None:
    def work(groups: Any) -> list[float]:
        mesh, stages = groups.mesh, groups.stages
        stages.warm_up(CPU)
        hidden = torch.full((2, 3), 7.0)
        if not mesh.is_first_stage:
            hidden = stages.receive_hidden((2, 3), torch.float32, CPU)
        if not mesh.is_last_stage:
            stages.send_hidden(hidden + 1)
        return hidden.flatten().tolist()

    assert run_ranks(work, topology(pp=3)) == [[7.0] * 6, [8.0] * 6, [9.0] * 6]


class FakeSum(SmallSum):
    """Adds up as if there were `size` ranks that all have the same numbers as rank 0, plus their rank."""

    def __init__(self, rank: int, size: int, *, error: float = 0.0) -> None:
        self.rank, self.size, self.error = rank, size, error

    def serves(self, x: torch.Tensor) -> bool:
        return True

    def add_up(self, x: torch.Tensor) -> None:
        x.sub_(self.rank).mul_(self.size).add_(sum(range(self.size)) + self.error)


def open_fake(make: Callable[[], SmallSum], agree: Callable[[bool], bool] = bool, *, is_possible: bool = True) -> Any:
    return open_small_sum(make, is_possible=is_possible, rank=1, size=4, device=CPU, agree=agree)


def test_small_sum_that_works_is_used() -> None:
    assert isinstance(open_fake(lambda: FakeSum(1, 4)), FakeSum)


def test_small_sum_is_not_tried_where_it_cannot_work() -> None:
    def make() -> SmallSum:
        raise AssertionError("it was tried")

    assert open_fake(make, is_possible=False) is None
    assert open_fake(make, lambda _: False) is None, "another rank cannot"


def test_small_sum_failure_is_logged_once_and_leaves_nccl(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> SmallSum:
        raise RuntimeError("no fabric handles")

    agreed = []

    def agree(is_true: bool) -> bool:
        agreed.append(is_true)
        return is_true

    with caplog.at_level(logging.WARNING):
        assert open_fake(make, agree) is None
    assert agreed == [True, False]
    (record,) = caplog.records
    assert "no fabric handles" in record.getMessage()


def test_small_sum_that_is_wrong_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert open_fake(lambda: FakeSum(1, 4, error=1.0)) is None
    assert "a sum was wrong" in caplog.text


def test_small_sum_of_another_rank_that_fails_is_not_used() -> None:
    answers = iter([True, True, False])
    assert open_fake(lambda: FakeSum(1, 4), lambda _: next(answers)) is None


def test_group_agrees_on_a_small_sum_among_its_ranks() -> None:
    groups = make_groups("gloo", 2)

    def work(group: TorchGroup, failing: int) -> bool:
        def make() -> SmallSum:
            if group.rank == failing:
                raise RuntimeError("cannot map the memory")
            return FakeSum(group.rank, group.size)

        group.open_small_sum(make, is_possible=True, device=CPU)
        return group._small_sum is not None

    assert together([partial(work, group, 1) for group in groups]) == [False, False]
    assert together([partial(work, group, -1) for group in groups]) == [True, True]


@pytest.mark.parametrize(
    ("x", "is_served"),
    [
        (torch.zeros(8), True),
        (torch.zeros((4, 64), dtype=torch.bfloat16), True),
        (torch.zeros(MAX_SUM_BYTES // 4), True),
        (torch.zeros(MAX_SUM_BYTES // 4 + 4), False),
        (torch.zeros(0), False),
        (torch.zeros(7), False),
        (torch.zeros(12)[1:9], False),
        (torch.zeros((4, 64))[:, :32], False),
        (torch.zeros(8, dtype=torch.float16), False),
    ],
)
def test_symmetric_sum_serves_small_aligned_tensors(x: torch.Tensor, is_served: bool) -> None:
    assert SymmetricSum.serves(object.__new__(SymmetricSum), x) == is_served


NUM_EXPERTS, TOP_K, HIDDEN = 6, 2, 16


class ScaledRows(ExpertProducts):
    """Experts that multiply by their number plus 1."""

    def __init__(self, experts: list[int]) -> None:
        self._factors = torch.tensor(experts) + 1.0

    def sums(self, x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        factors = self._factors[slots.clamp(min=0)] * (slots >= 0) * weights
        return x * factors.sum(dim=1, keepdim=True)


def test_all_gather_dispatch_reads_nothing_from_the_device(groups: list[TorchGroup]) -> None:
    """Routed experts, counts and slots included; the tokens of ranks differ in number."""
    size = len(groups)
    counts = [3, 0, 5][:size]
    placement = np.array([*range(NUM_EXPERTS), *range(size)][: NUM_EXPERTS + (-NUM_EXPERTS) % size])
    chosen = [torch.rand(count, NUM_EXPERTS).topk(TOP_K).indices for count in counts]
    x = [torch.randn(count, HIDDEN) for count in counts]
    weights = [torch.rand(count, TOP_K) for count in counts]

    def work(group: TorchGroup) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rank = group.rank
        slots = LayerExpertSlots(placement, num_experts=NUM_EXPERTS, rank=rank, num_ranks=size)
        products = ScaledRows(slots.local_experts)
        trace = ExpertTrace(num_layers=1, num_experts=NUM_EXPERTS, top_k=TOP_K, device=CPU, keeps_ids=True)
        trace.reserve(max(counts))
        trace._host = None  # as on a GPU
        with no_host_reads():
            trace.record(0, chosen[rank])
            out = AllGatherTokenDispatcher(group)(x[rank], chosen[rank], weights[rank], products, slots, counts)
            ids = trace.ids(range(counts[rank]), counts[rank])
        return out, ids, trace.counts[0]

    for rank, (out, ids, seen) in enumerate(together([partial(work, group) for group in groups])):
        expected = x[rank] * ((chosen[rank] + 1) * weights[rank]).sum(dim=1, keepdim=True)
        torch.testing.assert_close(out, expected)
        assert torch.equal(ids[:, 0].long(), chosen[rank])
        assert seen.tolist() == torch.bincount(chosen[rank].flatten(), minlength=NUM_EXPERTS).tolist()
