"""The versions of the weights that made the tokens of a completion, as its reader gets them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from client_fakes import deliver as deliver_one
from client_fakes import make_request
from client_tokenizers import load
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.completion import WeightVersions
from eagleray.messages.outputs import Chunk, FinishReason

TOKENIZER = load("byte_level")
HELLO, WORLD = (TOKENIZER.encode(text, add_special_tokens=False)[0] for text in ("hello", " world"))


def chunk(*token_ids, **fields):
    return Chunk(request_id="", token_ids=list(token_ids), **fields)


def deliver(request, index, *chunks):
    for one in chunks:
        deliver_one(request, index, one)


def spans(part):
    return [(span.version, span.start, span.end) for span in part.weight_versions]


def test_output_versions_cover_the_tokens():
    request = make_request(tokenizer=None)
    deliver(request, 0, chunk(1), chunk(2, weight_version="one"), chunk(3), chunk(4, weight_version="two"))
    assert spans(request.output().outputs[0]) == [("default", 0, 1), ("one", 1, 3), ("two", 3, 4)]


def test_output_without_tokens_has_no_versions():
    assert spans(make_request(tokenizer=None).output().outputs[0]) == []


def test_output_version_of_the_first_token_replaces_default():
    request = make_request(tokenizer=None)
    deliver(request, 0, chunk(1, weight_version="one"), chunk(2))
    assert spans(request.output().outputs[0]) == [("one", 0, 2)]


def test_pop_delta_only_the_last_has_versions_of_the_whole_completion():
    request = make_request(tokenizer=None)
    deliver(request, 0, chunk(1))
    assert request.pop_delta().outputs[0].weight_versions is None
    deliver(request, 0, chunk(2, weight_version="one", finish_reason=FinishReason.ABORT))
    assert spans(request.pop_delta().outputs[0]) == [("default", 0, 1), ("one", 1, 2)]


def test_abort_before_the_end_has_versions():
    request = make_request(tokenizer=None)
    deliver(request, 0, chunk(1, 2, weight_version="one"))
    request.abort()
    assert spans(request.pop_delta().outputs[0]) == [("one", 0, 2)]


def test_stop_string_that_truncates_ends_the_versions():
    request = make_request(tokenizer=TOKENIZER, stop=["hello"])
    deliver(request, 0, chunk(WORLD), chunk(WORLD, HELLO, WORLD, weight_version="one"))
    part = request.output().outputs[0]
    assert part.token_ids == [WORLD, WORLD, HELLO]
    assert spans(part) == [("default", 0, 1), ("one", 1, 3)]


@pytest.mark.parametrize("version", [None, "one", "two"])
def test_engine_exit_keeps_versions_and_the_next_engine_begins_with_its_own(version):
    """The next engine names the version of its first token unless that is "default"."""
    request = make_request(tokenizer=None, max_restarts=3)
    request.next_messages()
    deliver(request, 0, chunk(1), chunk(2, weight_version="one"))
    request.on_engine_exit("killed")
    request.next_messages()
    request.on_engine_exit("killed before its first token")
    request.next_messages()
    deliver(request, 0, chunk(3, weight_version=version), chunk(4))
    expected = [("default", 0, 1), ("one", 1, 4)] if version == "one" else [
        ("default", 0, 1), ("one", 1, 2), (version or "default", 2, 4)
    ]  # fmt: skip
    assert spans(request.output().outputs[0]) == expected


@given(st.lists(st.sampled_from(["default", "a", "b"])), st.integers(0, 12))
def test_spans_equal_runs_of_equal_versions(versions, num_kept):
    """Each token's version is given where it changes; tokens may be truncated afterwards."""
    versions_of_tokens, current = WeightVersions(), "default"
    for index, version in enumerate(versions):
        if version != current:
            versions_of_tokens.begin(version, index)
            current = version
    kept = versions[:num_kept]
    found = versions_of_tokens.spans(len(kept))
    assert [span.version for span in found for _ in range(span.start, span.end)] == kept
    assert all(one.version != other.version for one, other in pairwise(found))
    assert all(span.start < span.end for span in found)
