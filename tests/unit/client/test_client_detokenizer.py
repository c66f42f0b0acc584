"""Stop strings: the position where they end a text, and that no part of one is ever released."""

from __future__ import annotations

import pytest
from client_tokenizers import KINDS, load
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.text.detokenizer import Detokenizer

TOKENIZERS = {kind: load(kind) for kind in KINDS}
TEXTS = st.text(st.sampled_from("ab€ 京\n"), max_size=25)


def read(kind, token_ids, *, chunk=1, **options):
    """Return (pieces of text, stop string, number of tokens up to it)."""
    detokenizer = Detokenizer(TOKENIZERS[kind], skip_special_tokens=True, **options)
    pieces = []
    for start in range(0, len(token_ids), chunk):
        match = detokenizer.push(token_ids[start : start + chunk])
        pieces.append(detokenizer.pop_text())
        if match:
            return pieces, match.stop_string, start + match.num_tokens
    detokenizer.flush()
    return [*pieces, detokenizer.pop_text()], None, len(token_ids)


def expected(kind, token_ids, stop_strings, include, min_tokens):
    """Return (text, stop string, number of tokens up to it), from the texts of all prefixes of the tokens."""

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
def test_detokenizer_first_stop_string_ends_text(kind, text, stop_strings, include, min_tokens, chunk, data):
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for _ in range(data.draw(st.integers(0, 2))):  # tokens that are in no encoded text
        token_ids.insert(data.draw(st.integers(0, len(token_ids))), data.draw(st.integers(0, tokenizer.vocab_size)))
    options = {"stop_strings": stop_strings, "include_stop_string": include, "min_tokens": min_tokens}
    pieces, stop_string, num_tokens = read(kind, token_ids, chunk=chunk, **options)
    assert ("".join(pieces), stop_string, num_tokens) == expected(kind, token_ids, stop_strings, include, min_tokens)


def pieces_of(text, **options):
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = [tokenizer.encode(character, add_special_tokens=False)[0] for character in text]
    return read("byte_level", token_ids, **options)


def test_detokenizer_possible_stop_string_is_held_until_certain():
    assert pieces_of("xabyab", stop_strings=["abc"]) == (["x", "", "", "aby", "", "", "ab"], None, 6)
    assert pieces_of("xababc!", stop_strings=["abc"]) == (["x", "", "", "ab", "", ""], "abc", 6)


def test_detokenizer_several_stop_strings_first_complete_then_longest_wins():
    assert pieces_of("xabcd", stop_strings=["abcd", "bc"]) == (["x", "", "", "a"], "bc", 4)
    assert pieces_of("xabc", stop_strings=["c", "abc", "bc"]) == (["x", "", "", ""], "abc", 4)


def test_detokenizer_stop_string_before_min_tokens_is_ignored():
    assert pieces_of("ababab", stop_strings=["ab"], min_tokens=3) == (["", "ab", "", ""], "ab", 4)
    assert pieces_of("aaaa", stop_strings=["aa"], min_tokens=3) == (["", "a", ""], "aa", 3)


def test_detokenizer_include_stop_string_ends_text_with_it():
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = tokenizer.encode("hello world", add_special_tokens=False)
    pieces, stop_string, _ = read("byte_level", token_ids, stop_strings=["o w"], include_stop_string=True)
    assert ("".join(pieces), stop_string) == ("hello w", "o w")


def test_detokenizer_stop_string_of_byte_tokens_ends_text_at_last_byte():
    token_ids = [*TOKENIZERS["byte_fallback"].encode("a€", add_special_tokens=False)]
    pieces, stop_string, num_tokens = read("byte_fallback", [*token_ids, token_ids[0]], stop_strings=["€"])
    assert ("".join(pieces), stop_string, num_tokens) == ("a", "€", len(token_ids))


def test_detokenizer_finds_stop_strings_in_kept_special_tokens():
    end, *text = TOKENIZERS["byte_level"].encode("<|im_end|>ab<|im_start|>a", add_special_tokens=False)
    pieces, stop, count = read("byte_level", [*text, end], kept_special_ids=[end], stop_strings=["a<|im_e"])
    assert ("".join(pieces), stop, count) == ("ab", "a<|im_e", len(text) + 1)
    assert read("byte_level", [*text, end], stop_strings=["a<|im_e"])[1] is None
