"""Tokens reach the rows of the request that they belong to, however late they come."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
import torch

from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import NewRow
from eagleray.parallel.mesh import Mesh
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.token_relay import TokenRelay


class FakeTP:
    """Rank 0 of a group, or a rank that hears what the test says."""

    def __init__(self) -> None:
        self.said: deque[list[int]] = deque()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.said.popleft()) if self.said else x


class FakeStages:
    def __init__(self) -> None:
        self.sent: deque[list[int]] = deque()

    def send_tokens(self, token_ids: torch.Tensor) -> None:
        self.sent.append(token_ids.tolist())

    def receive_tokens(self, count: int) -> torch.Tensor:
        tokens = self.sent.popleft()
        assert len(tokens) == count
        return torch.tensor(tokens)


class FakeGroups:
    def __init__(self, *, rank: int, tp_size: int = 1, pp_size: int = 1) -> None:
        self.mesh = Mesh(rank=rank, tp_size=tp_size, pp_size=pp_size)
        self.tp = FakeTP()
        self.stages = FakeStages()


def start(rows: InputBatch, row: int, token_ids: list[int]) -> None:
    rows.add_row(
        NewRow(
            row=row,
            request_id=str(row),
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            num_computed_tokens=0,
            block_ids=[row],
            sampling=Sampling(seed=0),
        )
    )


@pytest.fixture
def rows() -> InputBatch:
    rows = InputBatch(num_rows=4, max_model_len=16, block_size=4)
    for row in range(3):
        start(rows, row, [10 * row, 10 * row + 1])
    return rows


def known(rows: InputBatch, row: int) -> list[int]:
    return rows.token_ids[row, : rows.num_tokens[row]].tolist()


def array(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_with_one_stage_every_rank_knows_at_once(rows):
    groups = FakeGroups(rank=1, tp_size=2)
    groups.tp.said.append([7, 8])
    relay = TokenRelay(groups, rows)
    relay.share(array(2, 0), None)
    assert (known(rows, 2), known(rows, 0)) == ([20, 21, 7], [0, 1, 8])
    relay.catch_up(array(0, 2))


def test_the_sampler_of_the_last_stage_sends_and_knows(rows):
    groups = FakeGroups(rank=1, pp_size=2)
    TokenRelay(groups, rows).share(array(1), array(5))
    assert known(rows, 1) == [10, 11, 5]
    assert list(groups.stages.sent) == [[5]]


def test_the_first_stage_waits_for_what_it_needs_and_no_more(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(array(0, 1), None)
    relay.share(array(2), None)
    assert rows.num_tokens[:3].tolist() == [3, 3, 3]
    groups.stages.sent.append([5, 6])
    relay.catch_up(array(1))
    assert (known(rows, 0), known(rows, 1)) == ([0, 1, 5], [10, 11, 6])
    groups.stages.sent.append([7])
    relay.catch_up(array(0, 2))
    assert known(rows, 2) == [20, 21, 7]
    relay.catch_up(array(0, 1, 2))


def test_a_token_for_an_ended_request_does_not_reach_the_next_one_in_its_row(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(array(0, 1), None)
    start(rows, 0, [90, 91, 92])
    relay.catch_up(array(0))  # what is on the way is not for this request: no need to wait
    groups.stages.sent.append([5, 6])
    relay.catch_up(array(0, 1))
    assert (known(rows, 0), known(rows, 1)) == ([90, 91, 92], [10, 11, 6])


def test_the_other_ranks_of_the_first_stage_hear_it_from_its_first(rows):
    groups = FakeGroups(rank=1, tp_size=2, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(array(0), None)
    groups.tp.said.append([9])
    relay.catch_up(array(0))
    assert known(rows, 0) == [0, 1, 9]


def test_tokens_that_nobody_asks_for_do_not_pile_up(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    for step in range(20):
        start(rows, 0, [1, 2])
        relay.share(array(0), None)
        groups.stages.sent.append([step])
    assert len(groups.stages.sent) <= 4


def test_a_middle_stage_only_counts(rows):
    groups = FakeGroups(rank=1, pp_size=3)
    relay = TokenRelay(groups, rows)
    relay.share(array(0), None)
    relay.catch_up(array(0))
    assert rows.num_tokens[0] == 3
