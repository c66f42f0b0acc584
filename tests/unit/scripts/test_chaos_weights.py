"""The comparison of answers with the weights that made them finds every kind of mixture."""

from __future__ import annotations

import pytest
from chaos_load import ChaosAnswer, Choice
from chaos_weights import Labels, find_wrong_versions, make_variants

OLD, NEW = [1, 2, 3, 4], [5, 6, 7, 8]


def span(version, start, end):
    return {"version": version, "start": start, "end": end}


def find(token_ids, spans, oldest="default"):
    labels = Labels()
    labels.add("v1", 1)
    labels.add("v2", 0)
    expected = [ChaosAnswer({0: Choice(token_ids=tokens)}) for tokens in (OLD, NEW)]
    answer = ChaosAnswer({0: Choice(token_ids=token_ids, weight_versions=spans)})
    return find_wrong_versions(answer, expected, labels, oldest)


@pytest.mark.parametrize(
    ("token_ids", "spans"),
    [
        (OLD, []),
        (NEW, [span("v1", 0, 4)]),
        ([1, 2, 9, 9], [span("default", 0, 2), span("v1", 2, 4)]),  # with the old cache the rest is not known
        ([5, 9, 9, 9], [span("v1", 0, 1), span("v2", 1, 4)]),
    ],
)
def test_find_wrong_versions_tokens_of_their_versions_are_right(token_ids, spans):
    assert find(token_ids, spans) == []


@pytest.mark.parametrize(
    ("token_ids", "spans", "message"),
    [
        (NEW, [], "tokens"),
        ([5, 6, 3, 4], [span("v1", 0, 4)], "from position 2 on"),
        ([1, 6, 7, 8], [span("default", 0, 2), span("v1", 2, 4)], "from position 1 on"),
        (OLD[:3], [span("default", 0, 3)], "tokens"),
        (OLD, [span("default", 0, 2), span("v1", 3, 4)], "without gaps"),
        (OLD, [span("default", 0, 2), span("v1", 2, 3)], "without gaps"),
        (NEW, [span("v1", 0, 2), span("default", 2, 4)], "in the order"),
        (OLD, [span("v9", 0, 4)], "never pushed"),
    ],
)
def test_find_wrong_versions_names_what_is_wrong(token_ids, spans, message):
    assert any(message in what for what in find(token_ids, spans))


def test_find_wrong_versions_weights_older_than_the_last_commit_are_wrong():
    assert find(OLD, [], oldest="default") == []
    assert any("older than 'v1'" in what for what in find(OLD, [], oldest="v1"))


def test_make_variants_have_equal_names_and_different_matrices():
    variants = [dict(variant) for variant in make_variants(None)]
    names = variants[0].keys()
    assert all(variant.keys() == names for variant in variants)
    matrix = next(name for name in names if variants[0][name].dim() == 2)
    assert len({variant[matrix].float().numpy().tobytes() for variant in variants}) == len(variants)
