"""Markers in text that comes in pieces."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagleray.client.answers.marker_search import MarkerFound, MarkerSearch


@given(st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3), st.text("ab<", max_size=12), st.data())
def test_find_any_prefix_agrees_with_whole_text(markers: list[str], text: str, data: st.DataObject) -> None:
    search = MarkerSearch(*markers)
    whole = search.find(text, is_last=True)
    found = search.find(text[: data.draw(st.integers(0, len(text)))])
    if found.marker is not None:
        assert found == whole
    else:
        assert found.end <= whole.end


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x<call>y", MarkerFound(1, "<call>")),
        ("x<call", MarkerFound(1, None)),  # may become the longer marker
        ("x<calls>", MarkerFound(1, "<calls>")),
        ("x<cell", MarkerFound(6, None)),
        ("x<<ca", MarkerFound(2, None)),
    ],
)
def test_find_text_of_markers_holds_only_beginnings(text: str, expected: MarkerFound) -> None:
    assert MarkerSearch("<call>", "<calls>").find(text) == expected


def test_find_last_text_takes_beginning_as_text() -> None:
    assert MarkerSearch("<call>").find("x<call", is_last=True) == MarkerFound(6, None)


@pytest.mark.parametrize("markers", [(), ("a", "")])
def test_marker_search_no_marker_raises(markers: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="needs markers"):
        MarkerSearch(*markers)
