"""Stop strings: where they end a text, and that no part of one is ever seen."""

from __future__ import annotations

import pytest
from client_tokenizers import KINDS, load
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.text.detokenizer import Detokenizer

TOKENIZERS = {kind: load(kind) for kind in KINDS}
TEXTS = st.text(st.sampled_from("ab€ 京\n"), max_size=25)


def read(kind, token_ids, *, chunk=1, **options):
    """(every piece of text, the stop string, number of tokens up to it)"""
    detokenizer = Detokenizer(TOKENIZERS[kind], skip_special_tokens=True, **options)
    pieces = []
    for start in range(0, len(token_ids), chunk):
        stopped = detokenizer.push(token_ids[start : start + chunk])
        pieces.append(detokenizer.pop_text())
        if stopped:
            return pieces, stopped.stop_string, start + stopped.num_tokens
    detokenizer.flush()
    return [*pieces, detokenizer.pop_text()], None, len(token_ids)


def expected(kind, token_ids, stop_strings, include, min_tokens):
    """The same from the text of every beginning of the tokens."""

    def text_of(count):
        return TOKENIZERS[kind].decode(token_ids[:count], skip_special_tokens=True)

    ignored = len(text_of(max(0, min_tokens - 1)).rstrip("\ufffd"))
    for count in range(max(1, min_tokens), len(token_ids) + 1):
        text = text_of(count)
        ends = [
            (end, end - len(stop_string), stop_string)
            for stop_string in stop_strings
            for end in range(ignored + 1, len(text) + 1)
            if text[:end].endswith(stop_string)
        ]
        if ends:
            end, start, stop_string = min(ends)
            return text[: end if include else start], stop_string, count
    return text_of(len(token_ids)), None, len(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@settings(max_examples=120, deadline=None)
@given(
    text=TEXTS,
    stop_strings=st.lists(st.text(st.sampled_from("ab€ 京\n"), min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 8),
    chunk=st.integers(1, 4),
    data=st.data(),
)
def test_the_first_stop_string_ends_the_text(kind, text, stop_strings, include, min_tokens, chunk, data):
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(data.draw(st.integers(0, 2))):  # tokens that no text is encoded to
        token_ids.insert(data.draw(st.integers(0, len(token_ids))), data.draw(st.integers(0, tokenizer.vocab_size)))
    options = {"stop_strings": stop_strings, "include_stop_string": include, "min_tokens": min_tokens}
    pieces, stop_string, num_tokens = read(kind, token_ids, chunk=chunk, **options)
    assert ("".join(pieces), stop_string, num_tokens) == expected(kind, token_ids, stop_strings, include, min_tokens)


def pieces_of(text, **options):
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in text]
    return read("byte_level", token_ids, **options)


def test_what_may_become_a_stop_string_is_held_back_and_let_go_when_it_does_not():
    assert pieces_of("xabyab", stop_strings=["abc"]) == (["x", "", "", "aby", "", "", "ab"], None, 6)
    assert pieces_of("xababc!", stop_strings=["abc"]) == (["x", "", "", "ab", "", ""], "abc", 6)


def test_the_string_that_is_complete_first_wins_then_the_longest():
    assert pieces_of("xabcd", stop_strings=["abcd", "bc"]) == (["x", "", "", "a"], "bc", 4)
    assert pieces_of("xabc", stop_strings=["c", "abc", "bc"]) == (["x", "", "", ""], "abc", 4)


def test_min_tokens():
    assert pieces_of("ababab", stop_strings=["ab"], min_tokens=3) == (["", "ab", "", ""], "ab", 4)
    assert pieces_of("aaaa", stop_strings=["aa"], min_tokens=3) == (["", "a", ""], "aa", 3)


def test_the_stop_string_is_included_on_request_and_nothing_beyond_it():
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    pieces, stop_string, _ = read("byte_level", token_ids, stop_strings=["o w"], include_stop_string=True)
    assert ("".join(pieces), stop_string) == ("hello w", "o w")


def test_a_stop_string_of_byte_tokens_ends_the_text_with_its_last_byte():
    token_ids = [*TOKENIZERS["byte_fallback"].encode("a€", add_special_tokens=False)]
    pieces, stop_string, num_tokens = read("byte_fallback", [*token_ids, token_ids[0]], stop_strings=["€"])
    assert ("".join(pieces), stop_string, num_tokens) == ("a", "€", len(token_ids))
