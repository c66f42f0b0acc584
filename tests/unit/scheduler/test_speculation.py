"""Predictions, their probabilities and prices, and the table of n-grams."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import request

from eagleray.config.speculation import speculation
from eagleray.scheduler.request import new_request
from eagleray.scheduler.speculation import MAX_INDEXED_AT_ONCE, Drafter
from eagleray.scheduler.step_costs import StepCosts
from eagleray.scheduler.token_index import TokenIndex

OPTIONS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def drafter_of(prompt):
    drafter = Drafter(speculation(OPTIONS))
    state = new_request(
        request("a", prompt, max_tokens=999), priority=0, arrival=0, max_model_len=9999, vocab_size=9999
    )
    follower = drafter.begin(state)
    while follower.num_indexed < len(prompt):
        drafter.index_tokens(follower, state.token_ids)
    return drafter, follower, state.token_ids


def generate(drafter, follower, token_ids, tokens):
    for token in tokens:
        token_ids.append(token)
        drafter.on_token(follower, token_ids)


def test_drafter_prompt_is_repeated_drafts_what_follows():
    drafter, follower, token_ids = drafter_of([1, 2, 3, 4, 5, 6, 7, 8])
    generate(drafter, follower, token_ids, [2])
    assert drafter.draft(follower, token_ids, limit=4, num_rows=1) == []
    generate(drafter, follower, token_ids, [3])
    assert drafter.draft(follower, token_ids, limit=2, num_rows=1) == [4, 5]
    generate(drafter, follower, token_ids, [4, 5])
    assert drafter.draft(follower, token_ids, limit=99, num_rows=1) == [6, 7, 8, 2]


def test_drafter_period_shorter_than_draft_repeats_the_draft():
    drafter, follower, token_ids = drafter_of([9, 1, 2])
    generate(drafter, follower, token_ids, [1, 2, 1, 2])
    assert drafter.draft(follower, token_ids, limit=4, num_rows=1) == [1, 2, 1, 2]


def test_drafter_wrong_predictions_stop_drafts_and_right_ones_start_them_again():
    drafter, follower, token_ids = drafter_of([1, 2, 3, 4, 5] * 40)
    for _ in range(50):
        drafter.costs.add(1, 1.0)
        drafter.costs.add(2, 1.5)
    for index in range(30):
        generate(drafter, follower, token_ids, [77 + index, 1, 2])
    assert follower.source is not None
    assert drafter.draft(follower, token_ids, limit=4, num_rows=1) == []
    generate(drafter, follower, token_ids, [1, 2, 3, 4, 5] * 9 + [1])
    assert drafter.draft(follower, token_ids, limit=4, num_rows=1) == [2, 3, 4, 5]
    assert drafter.expected_gain(follower, 1) > 1


def test_drafter_long_prompt_is_indexed_in_parts():
    drafter, follower, token_ids = drafter_of([1])
    token_ids += range(3 * MAX_INDEXED_AT_ONCE)
    drafter.index_tokens(follower, token_ids)
    assert follower.num_indexed == 1 + MAX_INDEXED_AT_ONCE


def test_drafter_ended_request_is_forgotten():
    drafter, follower, _ = drafter_of([1, 2, 3, 1, 2])
    assert drafter._index.find(follower.number) is not None
    drafter.end(follower)
    assert not drafter._index._sequences


def test_token_index_full_table_finds_only_equal_tokens():
    """Entries are overwritten and collide all the time."""
    choose = random.Random(0)
    index = TokenIndex([2, 4], num_buckets=8)
    sequences = {number: [] for number in range(1, 5)}
    for number, token_ids in sequences.items():
        index.add(number, token_ids, domain=number % 2)
    num_found = 0
    for _ in range(3000):
        number = choose.randint(1, 4)
        token_ids = sequences[number]
        token_ids.append(choose.randrange(3))
        match = index.find(number)
        index.insert(number, len(token_ids))
        if match is not None:
            num_found += 1
            others, end, length = match
            assert length >= 2 and others[end - length : end] == token_ids[-length:]
            owner = next(one for one, tokens in sequences.items() if tokens is others)
            assert owner % 2 == number % 2 and (owner, end) != (number, len(token_ids))
    assert num_found > 1000


@pytest.mark.parametrize(("fixed", "per_token"), [(10.0, 0.1), (1.0, 1.0), (0.0, 1.0)])
def test_step_costs_steps_on_a_line_give_its_slope(fixed, per_token):
    costs = StepCosts()
    assert 0 < costs.share_of_token(1) < 1
    for index in range(300):
        num_tokens = 1 + index % 6
        costs.add(num_tokens, 1e-3 * (fixed + per_token * num_tokens) * (1000 if index == 200 else 1))
    for num_tokens in (1, 8, 64):
        share = per_token * num_tokens / (fixed + per_token * num_tokens)
        assert costs.share_of_token(num_tokens) == pytest.approx(share, rel=0.25, abs=0.02)
