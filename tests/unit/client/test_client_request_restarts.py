"""The number of engines that a request may lose, and the exits that are charged to it."""

from __future__ import annotations

import pytest
from client_fakes import make_request
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.request import PROGRESS_FACTOR


def sent_and_lost(request, *, is_started, has_token=False):
    """Send the request to an engine that exits. Returns whether it was a suspect, and the error that it fails with."""
    (message,) = request.next_messages()
    if is_started:
        request.record_started(has_token=has_token)
    return message.is_suspect, request.on_engine_exit("killed")


@pytest.mark.parametrize(("limit", "suspects"), [(0, 0), (1, 1), (2, 1), (3, 2), (5, 4)])
def test_restarts_always_started_request_fails_after_limit(limit, suspects):
    request = make_request(max_restarts=limit)
    sendings = [sent_and_lost(request, is_started=True) for _ in range(limit + 1)]
    assert [failure is not None for _, failure in sendings] == [False] * limit + [True]
    assert [is_suspect for is_suspect, _ in sendings].count(True) == suspects


def test_restarts_later_exit_charges_only_started_request():
    request = make_request(max_restarts=3)
    assert not request.next_messages()[0].announce_start
    assert sent_and_lost(request, is_started=False) == (False, None)
    assert request.next_messages()[0].announce_start
    for _ in range(5):
        assert sent_and_lost(request, is_started=False) == (False, None)
    assert sent_and_lost(request, is_started=True) == (False, None)
    for _ in range(5):
        assert sent_and_lost(request, is_started=False) == (True, None)
    assert sent_and_lost(request, is_started=True) == (True, None)
    is_suspect, failure = sent_and_lost(request, is_started=True)
    assert is_suspect
    assert str(failure) == "killed; 4 engines have ended with this request in flight, and `max_request_restarts` is 3"


def test_restarts_token_clears_count():
    request = make_request(max_restarts=3)
    assert sent_and_lost(request, is_started=True) == (False, None)
    for _ in range(4):
        assert sent_and_lost(request, is_started=True) == (False, None)
        assert sent_and_lost(request, is_started=True, has_token=True) == (True, None)
        assert not request.is_suspect


def test_restarts_token_before_every_exit_fails_after_larger_limit():
    request = make_request(max_restarts=3)
    sendings = [sent_and_lost(request, is_started=True, has_token=True) for _ in range(3 * PROGRESS_FACTOR + 1)]
    assert [is_suspect for is_suspect, _ in sendings] == [False] * 20 + [True] * 11
    assert [failure is not None for _, failure in sendings] == [False] * 30 + [True]
    assert "31 engines have ended with this request in flight, more than 10 times" in str(sendings[-1][1])


LIVES = st.lists(st.sampled_from(["waited", "started", "token"]), max_size=80)


@given(limit=st.integers(0, 4), before=LIVES)
def test_restarts_request_that_kills_every_engine_fails_after_any_history(limit, before):
    """A request that is never started again after its first exit never fails."""
    request = make_request(max_restarts=limit)
    for life in before:
        if sent_and_lost(request, is_started=life != "waited", has_token=life == "token")[1] is not None:
            return
    if before and limit > 0:
        assert all(sent_and_lost(request, is_started=False)[1] is None for _ in range(20))
    assert any(sent_and_lost(request, is_started=True)[1] is not None for _ in range(limit + 1))
