"""The decision for which requests a draft model proposes tokens, and what it learns from them."""

from __future__ import annotations

import pytest
from scheduler_fakes import request

from eagleray.config.speculation import speculation
from eagleray.scheduler.model_drafter import Asking, ModelDrafter
from eagleray.scheduler.request import new_request
from eagleray.scheduler.speculation import Candidate

STEP_SECONDS = 0.01


class Asked:
    """A drafter, and requests that ask for proposals. A step takes 10 ms for up to 16 tokens."""

    def __init__(self, num_requests=1, *, num_tokens=4):
        options = {"method": "draft_model", "model": "/draft", "num_speculative_tokens": num_tokens}
        self.drafter = ModelDrafter(speculation(options))
        self.followers = []
        for index in range(num_requests):
            message = request(str(index), [1] * 9, max_tokens=999)
            one = new_request(message, priority=0, arrival=index, max_model_len=9999, vocab_size=9999)
            self.followers.append(self.drafter.begin(one))

    @property
    def costs(self):
        return self.drafter.costs(len(self.followers))

    def measure(self, *, pass_seconds=0.0005, prompt_token_seconds=0.0001):
        for num_tokens in (1, 2, 4, 8, 16) * 9:
            self.costs.add(num_tokens, STEP_SECONDS)
            self.drafter.pass_costs.add(num_tokens, pass_seconds)
        self.drafter.on_passes([(512, 512 * prompt_token_seconds)], num_rows=len(self.followers))
        self.drafter.saved_seconds = 0.0
        return self

    def learn(self, is_right, times=60):
        """Have the first two tokens of proposals for the first request come true, or none."""
        for _ in range(times):
            self.come(self.followers[0], [5, 6], [5, 6] if is_right else [4])
        return self

    def come(self, follower, proposed, tokens):
        self.drafter.on_proposal(follower, proposed)
        for token in tokens:
            follower.request.token_ids.append(token)
            self.drafter.on_token(follower)

    def proposed(self, index, tokens):
        """Return a request for which these tokens are proposed."""
        self.drafter.on_proposal(self.followers[index], tokens)
        return self.followers[index]

    def counts(self, *, num_uncached=1, limit=99, is_catching_up=False):
        asking = [Asking(follower, limit, num_uncached, is_catching_up) for follower in self.followers]
        return self.drafter.propose(asking, num_rows=len(asking))


def test_propose_nothing_measured_proposes_nothing():
    assert Asked().counts() == [0]


def test_propose_new_engine_tries_and_checks_what_it_tries():
    one = Asked()
    one.costs.add(1, STEP_SECONDS)
    assert one.counts()[0] > 0
    one.drafter.on_proposal(one.followers[0], [5, 6])
    candidate = Candidate(one.followers[0], 99)
    assert one.drafter.choose([candidate], num_tokens=1, num_rows=1, room=99) == [[5, 6]]


def test_propose_right_tokens_are_as_many_as_pay():
    one = Asked().measure().learn(is_right=True)
    assert one.counts()[0] >= 2
    assert one.counts(limit=1) == [1]
    slow = Asked().measure(pass_seconds=STEP_SECONDS).learn(is_right=True)
    slow.costs.balance = 0.0
    assert slow.counts() == [0], "a pass takes the time of a step"


def test_propose_wrong_tokens_account_used_up_proposes_nothing_until_it_grows():
    one = Asked().measure().learn(is_right=False)
    num_trials = 0
    while one.counts() != [0]:
        one.drafter.on_passes([(1, 0.001), (1, 0.001)], num_rows=1)
        num_trials += 1
    assert 2 < num_trials < 9
    for _ in range(60):
        one.drafter.on_step(num_rows=1, num_drafts=0, num_accepted=0, seconds=STEP_SECONDS)
    assert one.counts()[0] > 0


def test_on_passes_computation_of_a_prompt_is_not_charged():
    one = Asked().measure()
    before = one.costs.balance
    one.drafter.on_passes([(4096, 0.4)], num_rows=1)
    assert before - 0.1 < one.costs.balance < before


@pytest.mark.parametrize(("num_uncached", "expected"), [(100, True), (2000, True), (9000, False)])
def test_propose_long_prompt_is_computed_if_its_time_is_saved(num_uncached, expected):
    """Right tokens save more than half of 128 steps, about 0.7 s; a token of a prompt takes 0.1 ms."""
    one = Asked().measure().learn(is_right=True)
    assert (one.counts(num_uncached=num_uncached)[0] > 0) == expected
    assert one.counts(num_uncached=num_uncached, is_catching_up=True)[0] > 0, "the rest is computed, too"


def test_propose_request_that_ends_soon_is_not_worth_its_prompt():
    one = Asked().measure().learn(is_right=True)
    assert one.counts(num_uncached=500)[0] > 0
    assert one.counts(num_uncached=500, limit=3) == [0]


def test_propose_drafts_have_not_saved_the_time_of_prompts_computes_no_further_prompt():
    one = Asked().measure().learn(is_right=True)
    assert one.counts(num_uncached=500)[0] > 0
    one.drafter.on_passes([(500, 0.05)], num_rows=1)
    assert one.counts(num_uncached=500) == [0] and one.counts()[0] > 0
    for _ in range(5):
        one.drafter.on_step(num_rows=1, num_drafts=2, num_accepted=2, seconds=STEP_SECONDS)
    assert one.counts(num_uncached=500)[0] > 0


def test_propose_prompts_for_trials_take_a_small_part_of_the_time():
    one = Asked(4).measure(pass_seconds=0.005)
    one.costs.balance = 0.5
    assert sum(count > 0 for count in one.counts(num_uncached=150)) == 2, "they take three of four steps"
    one.drafter.on_passes([(300, 0.03)], num_rows=4)
    assert one.counts(num_uncached=100) == [0] * 4
    for _ in range(700):
        one.drafter.on_step(num_rows=4, num_drafts=0, num_accepted=0, seconds=STEP_SECONDS)
    assert any(one.counts(num_uncached=100))


def test_on_token_probabilities_are_those_of_positions_and_of_the_request():
    one = Asked(2).measure()
    for _ in range(60):
        one.come(one.followers[0], [5, 6, 7], [5, 6, 8])
    first, second, third = one.drafter.draft(Candidate(one.proposed(0, [5, 6, 7]), 9), 9).probabilities
    assert first > 0.9 and second > 0.85 and third < 0.2
    for _ in range(20):
        one.come(one.followers[1], [5], [4])
    other = one.drafter.draft(Candidate(one.proposed(1, [5, 6, 7]), 9), 9).probabilities
    assert other[0] < first / 2


def test_on_token_proposal_goes_on_behind_right_tokens_and_ends_with_a_wrong_one():
    one = Asked()
    follower = one.followers[0]
    one.come(follower, [5, 6, 7], [5])
    assert one.drafter.is_predicted(follower)
    assert one.drafter.draft(Candidate(follower, 9), 9).token_ids == [6, 7]
    one.come(follower, [5, 6, 7], [5, 5])
    assert not one.drafter.is_predicted(follower)
