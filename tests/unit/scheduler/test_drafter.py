"""Predictions, their probabilities and prices, and the table of n-grams."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import request

from eagleray.config.speculation import speculation
from eagleray.scheduler.request import new_request
from eagleray.scheduler.speculation import MAX_INDEXED_AT_ONCE, Candidate, Drafter
from eagleray.scheduler.step_costs import StepCosts
from eagleray.scheduler.token_index import TokenIndex

OPTIONS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}


def drafter_of(prompt):
    drafter = Drafter(speculation(OPTIONS))
    state = new_request(
        request("a", prompt, max_tokens=999), priority=0, arrival=0, max_model_len=9999, vocab_size=9999
    )
    for num_tokens in (1, 64):
        drafter.costs.add(num_tokens, 1.0)
    follower = drafter.begin(state)
    while follower.num_indexed < len(prompt):
        drafter.index_tokens(follower, state.token_ids)
    return drafter, follower, state.token_ids


def generate(drafter, follower, token_ids, tokens):
    for token in tokens:
        token_ids.append(token)
        drafter.on_token(follower, token_ids)


def drafted(drafter, follower, token_ids, limit):
    candidate = Candidate(follower, token_ids, limit)
    return drafter.choose([candidate], num_tokens=1, num_rows=1, room=99)[0]


def test_drafter_prompt_is_repeated_drafts_what_follows():
    drafter, follower, token_ids = drafter_of([1, 2, 3, 4, 5, 6, 7, 8])
    generate(drafter, follower, token_ids, [2])
    assert drafted(drafter, follower, token_ids, 4) == []
    generate(drafter, follower, token_ids, [3])
    assert drafted(drafter, follower, token_ids, 2) == [4, 5]
    generate(drafter, follower, token_ids, [4, 5])
    assert drafted(drafter, follower, token_ids, 99) == [6, 7, 8, 2]


def test_drafter_period_shorter_than_draft_repeats_the_draft():
    drafter, follower, token_ids = drafter_of([9, 1, 2])
    generate(drafter, follower, token_ids, [1, 2, 1, 2])
    assert drafted(drafter, follower, token_ids, 4) == [1, 2, 1, 2]


def test_drafter_wrong_predictions_stop_drafts_and_right_ones_start_them_again():
    drafter, follower, token_ids = drafter_of([1, 2, 3, 4, 5] * 40)
    for num_tokens in range(1, 7):
        for _ in range(20):
            drafter.costs.add(num_tokens, 1 + 0.3 * num_tokens)
    for index in range(30):
        generate(drafter, follower, token_ids, [77 + index, 1, 2])
    assert follower.source is not None
    assert drafted(drafter, follower, token_ids, 4) == []
    generate(drafter, follower, token_ids, [1, 2, 3, 4, 5] * 9 + [1])
    assert drafted(drafter, follower, token_ids, 4) == [2, 3, 4, 5]
    assert drafter.gain_of_waiting([follower], num_rows=1) > 0.5


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


def test_step_costs_flat_then_rising_steps_are_interpolated():
    costs = StepCosts()
    assert costs.seconds(2) > costs.seconds(1) and costs.most_tokens == 2
    for _ in range(20):
        for num_tokens in (1, 8, 16, 40, 15):
            costs.add(num_tokens, max(0.04, 0.0025 * num_tokens))
    costs.add(8, 5.0)  # delayed by something else
    assert [costs.seconds(number) for number in (1, 4, 6)] == pytest.approx([0.04] * 3, rel=0.3)
    assert costs.seconds(24) == pytest.approx(0.06, rel=0.2)
    assert costs.seconds(64) > costs.seconds(40) == pytest.approx(0.1, rel=0.05)
    assert costs.most_tokens == 96
    before = costs.seconds(40)
    for _ in range(2000):
        costs.add(1, 0.04)
    assert costs.seconds(40) < before / 2, "the class is never tried again"


def test_drafter_large_steps_cost_more_drafts_fewer_tokens():
    drafter, follower, token_ids = drafter_of([1, 2, 3, 4, 5] * 9)
    generate(drafter, follower, token_ids, [1, 2, 3, 4, 5] * 9)
    for num_tokens in (1, 2, 4, 8, 12, 16, 24, 32, 64) * 20:
        drafter.costs.add(num_tokens, max(0.04, 0.005 * num_tokens))
    candidates = [Candidate(follower, token_ids, 4)] * 2
    assert drafter.choose(candidates, num_tokens=2, num_rows=2, room=99) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert sum(map(len, drafter.choose(candidates, num_tokens=2, num_rows=2, room=3))) == 3
    assert drafter.choose(candidates, num_tokens=20, num_rows=20, room=99) == [[], []]
