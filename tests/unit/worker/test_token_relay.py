"""Sampled tokens reach the rows of the request that they belong to, however late they arrive."""

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
    """Rank 0 of a group, or a rank that receives the tokens that the test has set."""

    def __init__(self) -> None:
        self.received: deque[list[int]] = deque()

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.received.popleft()) if self.received else x


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


def test_token_relay_one_stage_broadcasts_at_once(rows):
    groups = FakeGroups(rank=1, tp_size=2)
    groups.tp.received.append([7, 8])
    relay = TokenRelay(groups, rows)
    relay.share(rows.expect_tokens(array(2, 0)), None)
    assert (known(rows, 2), known(rows, 0)) == ([20, 21, 7], [0, 1, 8])
    relay.catch_up(array(0, 2))


def test_token_relay_sampler_of_last_stage_sends_and_appends(rows):
    groups = FakeGroups(rank=1, pp_size=2)
    TokenRelay(groups, rows).share(rows.expect_tokens(array(1)), array(5))
    assert known(rows, 1) == [10, 11, 5]
    assert list(groups.stages.sent) == [[5]]


def test_token_relay_first_stage_waits_only_for_needed_tokens(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(rows.expect_tokens(array(0, 1)), None)
    relay.share(rows.expect_tokens(array(2)), None)
    assert rows.num_tokens[:3].tolist() == [3, 3, 3]
    groups.stages.sent.append([5, 6])
    relay.catch_up(array(1))
    assert (known(rows, 0), known(rows, 1)) == ([0, 1, 5], [10, 11, 6])
    groups.stages.sent.append([7])
    relay.catch_up(array(0, 2))
    assert known(rows, 2) == [20, 21, 7]
    relay.catch_up(array(0, 1, 2))


def test_token_relay_late_token_does_not_reach_next_request_of_row(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(rows.expect_tokens(array(0, 1)), None)
    start(rows, 0, [90, 91, 92])
    relay.catch_up(array(0))  # the token in flight is not for this request, so there is nothing to wait for
    groups.stages.sent.append([5, 6])
    relay.catch_up(array(0, 1))
    assert (known(rows, 0), known(rows, 1)) == ([90, 91, 92], [10, 11, 6])


def test_token_relay_other_ranks_of_first_stage_receive_broadcast(rows):
    groups = FakeGroups(rank=1, tp_size=2, pp_size=2)
    relay = TokenRelay(groups, rows)
    relay.share(rows.expect_tokens(array(0)), None)
    groups.tp.received.append([9])
    relay.catch_up(array(0))
    assert known(rows, 0) == [0, 1, 9]


def test_token_relay_unneeded_tokens_are_received_in_bounded_number(rows):
    groups = FakeGroups(rank=0, pp_size=2)
    relay = TokenRelay(groups, rows)
    for step in range(20):
        start(rows, 0, [1, 2])
        relay.share(rows.expect_tokens(array(0)), None)
        groups.stages.sent.append([step])
    assert len(groups.stages.sent) <= 4


def test_token_relay_middle_stage_only_counts(rows):
    groups = FakeGroups(rank=1, pp_size=3)
    relay = TokenRelay(groups, rows)
    relay.share(rows.expect_tokens(array(0)), None)
    relay.catch_up(array(0))
    assert rows.num_tokens[0] == 3
