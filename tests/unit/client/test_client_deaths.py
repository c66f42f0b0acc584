"""How often a request may lose its engine, and which of those that lost it is charged."""

from __future__ import annotations

import pytest

from eagleray.client.recovery import Deaths


def sent_and_lost(deaths, *, is_started):
    """-> whether it was sent as a suspect, and what it fails with."""
    deaths.was_sent()
    is_suspect = deaths.is_suspect
    if is_started:
        deaths.was_started()
    return is_suspect, deaths.charge("killed")


@pytest.mark.parametrize(("limit", "suspects"), [(0, 0), (1, 1), (2, 1), (3, 2), (5, 4)])
def test_one_that_is_always_started_fails_after_its_limit(limit, suspects):
    deaths = Deaths(limit)
    sendings = [sent_and_lost(deaths, is_started=True) for _ in range(limit + 1)]
    assert [failure is not None for _, failure in sendings] == [False] * limit + [True]
    assert [is_suspect for is_suspect, _ in sendings].count(True) == suspects


def test_a_suspect_is_charged_only_if_it_was_started_since_it_was_sent():
    deaths = Deaths(3)
    for _ in range(2):
        assert sent_and_lost(deaths, is_started=False) == (False, None)
    for _ in range(5):
        assert sent_and_lost(deaths, is_started=False) == (True, None)
    assert sent_and_lost(deaths, is_started=True) == (True, None)
    for _ in range(5):
        assert sent_and_lost(deaths, is_started=False) == (True, None)
    is_suspect, failure = sent_and_lost(deaths, is_started=True)
    assert is_suspect
    assert str(failure) == "killed; 4 engines have ended with this request in flight, and `max_request_restarts` is 3"
