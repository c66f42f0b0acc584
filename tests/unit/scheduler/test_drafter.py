"""Predictions, their probabilities and prices."""

from __future__ import annotations

import random

import pytest
from scheduler_fakes import Engine, RandomDrafter, request, undisturbed

from eagleray.config.speculation import speculation
from eagleray.scheduler.acceptance import Acceptance, Calibration
from eagleray.scheduler.history_drafter import COLD_TOKENS, HistoryDrafter
from eagleray.scheduler.request import new_request
from eagleray.scheduler.speculation import Candidate

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 4}


class Drafted:
    """A request and a drafter whose steps take equal times, whatever is drafted, and whose predictions were right."""

    def __init__(self, prompt, options=NGRAM, *, drafter=None):
        self.drafter = drafter or HistoryDrafter(speculation(options))
        if drafter is None:
            for length in (2, 4, 8, 64):
                for _ in range(30):
                    self.drafter.acceptance.cell(length, count=1, total=1).add(True)
                    self.drafter.acceptance.cell(length, count=2, total=2).add(True)
            for num_rows in (1, 2, 20):
                for num_tokens in (num_rows, 64) * 9:
                    self.drafter.costs(num_rows).add(num_tokens, 1.0)
        message = request("a", prompt, max_tokens=999)
        self.request = new_request(message, priority=0, arrival=0, max_model_len=9999, vocab_size=9999)
        self.follower = self.drafter.begin(self.request)
        self.drafter.index_tokens(self.follower)

    def generate(self, tokens):
        for token in tokens:
            self.request.token_ids.append(token)
            self.drafter.on_token(self.follower)

    def draft(self, limit=99):
        if not self.drafter.is_predicted(self.follower):
            return []
        return self.drafter.choose([Candidate(self.follower, limit)], num_tokens=1, num_rows=1, room=99)[0]


@pytest.mark.parametrize("options", [NGRAM, SUFFIX], ids=lambda options: options["method"])
def test_drafter_prompt_is_repeated_drafts_what_follows(options):
    one = Drafted([1, 2, 3, 4, 5, 6, 7, 8], options)
    one.generate([2])
    assert one.draft() == []
    one.generate([3])
    assert one.draft(2) == [4, 5]
    one.generate([4, 5])
    assert one.draft()[:3] == [6, 7, 8]


def test_drafter_period_shorter_than_draft_repeats_the_draft():
    one = Drafted([9, 1, 2])
    one.generate([1, 2, 1, 2])
    assert one.draft() == [1, 2, 1, 2]


@pytest.mark.parametrize("options", [NGRAM, SUFFIX], ids=lambda options: options["method"])
def test_drafter_wrong_predictions_stop_drafts_and_right_ones_start_them_again(options):
    one = Drafted([1, 2, 3, 4, 5] * 40, options)
    for num_tokens in range(1, 7):
        for _ in range(20):
            one.drafter.costs(1).add(num_tokens, 1 + 0.3 * num_tokens)
    for index in range(30):
        one.generate([77 + index, 1, 2])
    assert one.draft() == []
    one.generate([1, 2, 3, 4, 5] * 9 + [1])
    assert one.draft() == [2, 3, 4, 5]
    assert one.drafter.gain_of_waiting([Candidate(one.follower, 99)], num_rows=1) > 0.4


def test_drafter_new_engine_drafts_nothing_before_predictions_were_right():
    one = Drafted([1, 2, 3, 4, 5], drafter=HistoryDrafter(speculation(NGRAM)))
    one.generate([9, 1, 2])
    assert one.drafter.is_predicted(one.follower) and one.draft() == []


def test_drafter_drafts_of_no_use_request_is_seldom_looked_up(monkeypatch):
    one = Drafted([1, 2, 3])
    choose = random.Random(0)
    one.generate([choose.randrange(9999) for _ in range(100)])
    assert not one.follower.is_cold, "a step takes a second, of which predictions are a small part"
    one.drafter.on_step(num_rows=50, num_drafts=0, num_accepted=0, seconds=0.01)
    one.generate([9998])
    assert one.follower.is_cold
    calls = []
    monkeypatch.setattr(one.drafter, "_warm_up", lambda follower: calls.append(follower))
    one.generate([choose.randrange(9999) for _ in range(10 * COLD_TOKENS)])
    assert len(calls) == 10
    monkeypatch.undo()
    one.generate(one.request.token_ids[20:32])
    assert one.draft() == one.request.token_ids[32:36]
    for _ in range(9):
        one.generate([1, 2, 3])
        one.drafter.on_checked(one.follower, 2)
    assert not one.follower.is_cold


def test_drafter_large_steps_cost_more_drafts_fewer_tokens():
    one = Drafted([1, 2, 3, 4, 5] * 9)
    one.generate([1, 2, 3, 4, 5] * 9)
    for num_rows in (2, 20):
        for num_tokens in (2, 4, 8, 12, 16, 20, 24, 32, 64) * 90:
            one.drafter.costs(num_rows).add(num_tokens, max(0.04, 0.005 * num_tokens))
    candidates = [Candidate(one.follower, 4)] * 2
    choose = one.drafter.choose
    assert choose(candidates, num_tokens=2, num_rows=2, room=99) == [[1, 2, 3, 4], [1, 2, 3, 4]]
    assert sum(map(len, choose(candidates, num_tokens=2, num_rows=2, room=3))) == 3
    assert choose(candidates, num_tokens=20, num_rows=20, room=99) == [[], []], "18 requests would wait for 2"


def test_drafter_step_computes_prompt_drafts_tokens_that_save_more_time_than_they_take():
    one = Drafted([1, 2, 3, 4, 5] * 9)
    one.generate([1, 2, 3, 4, 5] * 9)
    candidates = [Candidate(one.follower, 4)] * 2

    def drafted(room=99):
        return [len(draft) for draft in one.drafter.choose(candidates, num_tokens=500, num_rows=3, room=room)]

    assert drafted() == [0, 0], "the time of a prompt's token is unknown"
    for _ in range(99):
        one.drafter.on_prompt_step(num_tokens=500, seconds=50)
    assert drafted() == [4, 4], "two tokens take a second in other steps, and 0.2 s here"
    assert drafted(room=5) == [4, 1]
    for _ in range(99):
        one.drafter.on_prompt_step(num_tokens=500, seconds=200)
    assert drafted() == [0, 0]


def test_drafter_steps_have_lost_time_drafts_need_more_gain():
    one = Drafted([1, 2, 3, 4, 5] * 9)
    one.generate([1, 2, 3, 4, 5] * 9)
    costs = one.drafter.costs(1)
    for num_tokens in range(1, 9):
        for _ in range(30):
            costs.add(num_tokens, 1.0 + 1.8 * num_tokens)
    assert one.draft()
    while costs.balance > 0:
        one.drafter.on_step(num_rows=1, num_drafts=2, num_accepted=0, seconds=6.4)
    costs.balance = -0.01
    assert one.draft(1) == []
    one.drafter.on_step(num_rows=1, num_drafts=9, num_accepted=0, seconds=19.0)
    assert one.draft() == []


def test_drafter_suffix_drafts_are_limited_by_match_and_by_share():
    options = SUFFIX | {"num_speculative_tokens": 9, "suffix_decoding_min_token_prob": 0.6}
    one = Drafted([1, 2, 3, 4, 5, 6, 7, 8], options)
    one.generate([2, 3])
    assert one.draft() == [4, 5], "a match of two tokens"
    prompt = [30, 1, 2, 3, 40, 1, 2, 4]
    one = Drafted(prompt, options)
    one.generate([1, 2])
    assert one.follower.prediction.share == 0.5
    assert one.draft() == []


def test_acceptance_few_predictions_are_trusted_less():
    acceptance = Acceptance()
    cell = acceptance.cell(20, count=1, total=1)
    first = cell.probability
    assert first < 0.5
    for _ in range(10):
        cell.add(True)
    few = cell.probability
    for _ in range(100):
        cell.add(True)
    assert first < few < cell.probability < 1
    assert acceptance.cell(20, count=1, total=1) is cell
    others = [acceptance.cell(20, count=count, total=total) for count, total in ((2, 2), (3, 4), (1, 3))]
    assert len({*others, cell, acceptance.cell(2, count=1, total=1)}) == 5


def test_calibration_request_differs_from_others_counts_its_own():
    cell = Acceptance().cell(64, count=1, total=1)
    for _ in range(100):
        cell.add(True)
    request = Calibration()
    assert request.probability(cell) > 0.9
    for _ in range(20):
        request.add(False, cell)
    assert request.probability(cell) < 0.25
    for _ in range(100):
        request.add(True, cell)
    assert request.probability(cell) > 0.9


def test_scheduler_drafts_shorten_the_part_of_a_prompt():
    """A step has 16 tokens; a long prompt beside a request that repeats itself takes what its drafts leave."""
    engine = Engine(drafter=RandomDrafter(3), max_model_len=96, num_blocks=64)
    messages = [request("a", [1], max_tokens=30), request("b", range(60), max_tokens=2)]
    engine.add(messages[0])
    for _ in range(3):
        engine.step()
    engine.add(messages[1])
    engine.run()
    sizes = [sum(plan.num_tokens) for plan in engine.plans]
    assert max(sizes) == 16
    assert any(plan.drafts and sum(plan.num_tokens) == 16 for plan in engine.plans)
    for message in messages:
        assert engine.tokens(message.request_id) == undisturbed(message, max_model_len=96)[0]
