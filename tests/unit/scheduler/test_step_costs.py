"""Times of steps, and the account of what drafts have gained."""

from __future__ import annotations

import math

import pytest

from eagleray.scheduler.step_costs import LEAST_GAIN, LEAST_GAIN_IN_DEBT, StepCosts


def test_step_costs_flat_then_rising_steps_are_interpolated():
    costs = StepCosts()
    assert costs.seconds(2) > costs.seconds(1) and costs.most_tokens == 2
    for _ in range(80):
        for num_tokens in (1, 8, 16, 40, 15):
            costs.add(num_tokens, max(0.04, 0.0025 * num_tokens))
    costs.add(8, 5.0)  # delayed by something else
    assert [costs.seconds(number) for number in (1, 4, 6)] == pytest.approx([0.04] * 3, rel=0.1)
    assert costs.seconds(24) == pytest.approx(0.06, rel=0.2)
    assert costs.seconds(64) > costs.seconds(40) == pytest.approx(0.1, rel=0.05)
    assert costs.most_tokens == 96
    before = costs.seconds(40)
    for _ in range(4000):
        costs.add(1, 0.04)
    assert costs.seconds(40) < before / 2, "the class is never tried again"


def test_step_costs_first_step_of_class_is_delayed_counts_little():
    costs = StepCosts()
    costs.add(1, 0.01)
    costs.add(2, 3.0)
    assert costs.seconds(2) < 0.02


def test_step_costs_drafts_that_lose_are_ended_and_tried_again():
    costs = StepCosts()
    for num_tokens in (4, 8) * 20:
        costs.add(num_tokens, 0.01 * num_tokens)
    assert costs.least_gain == LEAST_GAIN
    costs.settle(
        num_rows=4, num_drafts=4, num_accepted=1, seconds=0.08
    )  # takes twice the time for a quarter more tokens
    assert costs.least_gain == LEAST_GAIN_IN_DEBT
    costs.settle(num_rows=4, num_drafts=4, num_accepted=0, seconds=0.08)
    assert costs.least_gain == math.inf
    num_steps = 0
    while costs.least_gain > LEAST_GAIN:
        costs.settle(num_rows=4, num_drafts=0, num_accepted=0, seconds=0.04)
        num_steps += 1
    assert 100 < num_steps < 300
    for _ in range(99):
        costs.settle(num_rows=4, num_drafts=4, num_accepted=4, seconds=0.08)
    assert costs.balance <= 1, "drafts may lose all that they have gained"


def test_step_costs_one_delayed_step_ends_no_drafts_that_gain():
    costs = StepCosts()
    for num_tokens in (1, 2) * 20:
        costs.add(num_tokens, 0.01)
    costs.balance = 0.9
    costs.settle(num_rows=1, num_drafts=1, num_accepted=1, seconds=0.9)
    assert costs.least_gain == LEAST_GAIN_IN_DEBT
    costs.balance = 0.9
    costs.charge(0.9, num_rows=1)
    assert costs.least_gain == LEAST_GAIN_IN_DEBT


def test_step_costs_loss_by_which_drafts_end_counts():
    """Otherwise they would go on after the next step, and lose as much again."""
    costs = StepCosts()
    for num_tokens in (1, 2) * 20:
        costs.add(num_tokens, 0.01)
    costs.balance = -0.99
    costs.settle(num_rows=1, num_drafts=1, num_accepted=0, seconds=0.015)
    for _ in range(90):
        costs.settle(num_rows=1, num_drafts=0, num_accepted=0, seconds=0.01)
    assert costs.least_gain == math.inf
