"""Tokens that requests share: which request finds those of which, and for how long."""

from __future__ import annotations

import pytest
from scheduler_fakes import request

from eagleray.config.speculation import speculation
from eagleray.messages.adapters import Adapter
from eagleray.scheduler import token_history
from eagleray.scheduler.adapters import AdapterInSlot
from eagleray.scheduler.request import new_request
from eagleray.scheduler.token_history import OwnTokens, SharedTokens

PROMPT = [1, 2, 3, 4, 5]
OUTPUT = [11, 12, 13, 14, 15, 16]


class Histories:
    def __init__(self, **fields):
        self.history = SharedTokens(speculation({"method": "suffix", **fields}))
        self.followers = []

    def begin(self, prompt=PROMPT, output=(), *, salt="", adapter=None, update=0):
        message = request(str(len(self.followers)), prompt, max_tokens=99, output=output, salt=salt)
        slot = None if adapter is None else AdapterInSlot(Adapter(name="x", number=adapter, path=""), slot=0)
        state = new_request(
            message, priority=0, arrival=0, max_model_len=999, vocab_size=999, adapter=slot, update=update
        )
        follower = self.history.begin(state)
        self.followers.append(follower)
        self.history.index_tokens(follower)
        return follower

    def generate(self, follower, tokens):
        for token in tokens:
            follower.token_ids.append(token)
            self.history.index_tokens(follower)

    def predicted(self, follower):
        """Return the token that the request is predicted to generate."""
        follower.places, follower.match_length = [], 0
        self.history.look_up(follower)
        return follower.places[0].token_ids[follower.places[0].position] if follower.places else None


"""Requests of an engine that drafts by suffixes."""


def test_shared_tokens_samples_of_a_prompt_find_each_other():
    histories = Histories()
    first, second = histories.begin(), histories.begin()
    histories.generate(first, OUTPUT)
    assert histories.predicted(second) == 11, "the tokens before are those of the prompt"
    histories.generate(second, OUTPUT[:3])
    assert histories.predicted(second) == 14 and second.match_length == len(PROMPT) + 3
    histories.history.end(first)
    assert histories.predicted(second) == 14, "the first request has finished"
    histories.generate(second, [7, 2, 3])
    assert histories.predicted(second) == 4, "it repeats its prompt"


@pytest.mark.parametrize(
    ("one", "other", "is_shared"),
    [
        ({"salt": "a"}, {"salt": "a"}, True),
        ({"salt": "a"}, {"salt": "b"}, False),
        ({"salt": "a"}, {}, False),
        ({"adapter": 1}, {"adapter": 1}, True),
        ({"adapter": 1}, {"adapter": 2}, False),
        ({"adapter": 1}, {}, False),
        ({"update": 1}, {}, True),
    ],
)
def test_shared_tokens_salt_and_adapter_separate_requests(one, other, is_shared):
    histories = Histories()
    histories.generate(histories.begin(**one), OUTPUT)
    follower = histories.begin(**other)
    histories.generate(follower, OUTPUT[:2])
    assert histories.predicted(follower) == (13 if is_shared else None)


def test_shared_tokens_prompts_are_found_by_their_requests_alone():
    histories = Histories()
    first = histories.begin([1, 2, 3, 4])
    other = histories.begin([8, 9])
    histories.generate(first, [2, 3])
    assert histories.predicted(first) == 4
    histories.generate(other, [2, 3])
    assert histories.predicted(other) is None


def test_shared_tokens_resumed_request_its_output_is_found():
    histories = Histories()
    histories.begin(output=OUTPUT)
    follower = histories.begin()
    histories.generate(follower, OUTPUT[:2])
    assert histories.predicted(follower) == 13


@pytest.mark.parametrize("num_cached", [0, 2])
def test_shared_tokens_only_last_finished_requests_are_kept(num_cached):
    histories = Histories(suffix_decoding_max_cached_requests=num_cached)
    starts = [20, 40, 60]
    for start in starts:
        follower = histories.begin([start])
        histories.generate(follower, range(start + 1, start + 9))
        histories.history.end(follower)
    for start, is_kept in zip(starts, [False, num_cached == 2, num_cached == 2], strict=True):
        follower = histories.begin([7])
        histories.generate(follower, [start + 3, start + 4])
        assert histories.predicted(follower) == (start + 5 if is_kept else None)


def test_shared_tokens_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(token_history, "MAX_SHARED_TOKENS", 100)
    histories = Histories()
    for number in range(30):
        followers = [histories.begin([number] * 40) for _ in range(3)]
        for follower in followers:
            histories.generate(follower, OUTPUT)
            histories.history.end(follower)
    assert len(histories.history._index) <= 5
    assert not histories.history._prompts and not histories.history._prompt_of


def test_own_tokens_long_prompt_is_indexed_in_parts(monkeypatch):
    monkeypatch.setattr(token_history, "MAX_INDEXED_AT_ONCE", 100)
    history = OwnTokens(speculation({"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2}))
    state = new_request(
        request("a", [*range(250), 3, 4], max_tokens=9), priority=0, arrival=0, max_model_len=999, vocab_size=999
    )
    follower = history.begin(state)
    for is_whole in (False, False, True):
        history.index_tokens(follower)
        history.look_up(follower)
        assert bool(follower.places) == is_whole
    assert follower.places[0].position == 5
    history.end(follower)
    assert len(history._index) == 0
