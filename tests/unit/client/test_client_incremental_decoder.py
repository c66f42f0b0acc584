"""Decoded pieces join to the decoded whole, for any tokens cut in any way."""

from __future__ import annotations

import pytest
from client_tokenizers import KINDS, TEXTS, load
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagleray.client.text.detokenizer import new_decoder

TOKENIZERS = {kind: load(kind) for kind in KINDS}
CHARACTERS = st.one_of(st.sampled_from("aé京😀👍🏽\u0301\u200d� ▁\n'."), st.characters(exclude_categories=["Cs"]))


def cuts(draw, items):
    """Cut the items into consecutive parts, some of them empty."""
    places = sorted(draw(st.lists(st.integers(0, len(items)), max_size=8)))
    return [items[start:end] for start, end in zip([0, *places], [*places, len(items)], strict=True)]


def some_tokens(draw, tokenizer):
    """Draw tokens of a text, any tokens, single bytes, and ids that are no token."""
    texts = st.one_of(st.sampled_from(TEXTS), st.text(CHARACTERS, max_size=12))
    of_text = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    of_anything = st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=5)
    of_bytes = st.lists(st.integers(3, 258), max_size=5)
    return [
        token_id for part in draw(st.lists(st.one_of(of_text, of_anything, of_bytes), max_size=5)) for token_id in part
    ]


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_decoder_pieces_join_to_whole_text(kind, skip_special_tokens, data):
    tokenizer = TOKENIZERS[kind]
    token_ids = some_tokens(data.draw, tokenizer)
    decoder = new_decoder(tokenizer, skip_special_tokens=skip_special_tokens)
    seen = 0
    text = ""
    whole = tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
    for part in cuts(data.draw, token_ids):
        text += decoder.push(part)
        seen += len(part)
        # Released text is final, and pending text is the rest if this were the end.
        assert whole.startswith(text)
        now = tokenizer.decode(token_ids[:seen], skip_special_tokens=skip_special_tokens)
        assert decoder.pending() in ("", now[len(text) :])
    text += decoder.flush()
    assert text == whole


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@settings(max_examples=60, deadline=None)
@given(text=st.text(CHARACTERS, max_size=30))
@example(text="a👨‍👩‍👧b")
def test_decoder_never_releases_part_of_character(kind, text):
    tokenizer = TOKENIZERS[kind]
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    decoder = new_decoder(tokenizer, skip_special_tokens=True)
    pieces = [decoder.push([token_id]) for token_id in token_ids]
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    assert "".join(pieces).count("\ufffd") <= whole.count("\ufffd")
    assert whole.startswith("".join(pieces))


def test_decoder_releases_plain_text_with_its_token():
    for kind, tokenizer in TOKENIZERS.items():
        token_ids = tokenizer.encode("the dog he is", add_special_tokens=False)
        decoder = new_decoder(tokenizer, skip_special_tokens=True)
        pieces = [decoder.push([token_id]) for token_id in token_ids]
        assert all(pieces[1:]), kind


def test_decoder_releases_character_with_its_last_token():
    tokenizer = TOKENIZERS["byte_level"]
    token_ids = [tokenizer.encode("a", add_special_tokens=False)[0]]
    token_ids += [
        token_id for byte in "€".encode() for token_id in range(256) if tokenizer.token_bytes(token_id) == bytes([byte])
    ]
    decoder = new_decoder(tokenizer, skip_special_tokens=True)
    assert [decoder.push([token_id]) for token_id in token_ids] == ["a", "", "", "€"]


def test_decoder_releases_invalid_bytes_at_once():
    tokenizer = TOKENIZERS["byte_level"]
    invalid = next(token_id for token_id in range(256) if tokenizer.token_bytes(token_id) == b"\xff")
    decoder = new_decoder(tokenizer, skip_special_tokens=True)
    assert decoder.push([invalid]) == "\ufffd"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback", "unigram"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_decoder_with_kept_special_tokens_leaves_out_the_others(kind, data):
    tokenizer = TOKENIZERS[kind]
    token_ids = some_tokens(data.draw, tokenizer)
    kept = data.draw(st.lists(st.sampled_from(sorted(tokenizer.special_ids)), unique=True))
    decoder = new_decoder(tokenizer, skip_special_tokens=True, kept_special_ids=kept)
    text = "".join(decoder.push(part) for part in cuts(data.draw, token_ids)) + decoder.flush()
    visible = [token_id for token_id in token_ids if token_id in kept or token_id not in tokenizer.special_ids]
    assert text == tokenizer.decode(visible, skip_special_tokens=False)


def test_tokenizer_special_ids_of_texts_leaves_out_plain_tokens():
    tokenizer = TOKENIZERS["byte_level"]
    (end,) = tokenizer.special_ids_of(["<|im_end|>", "<tool_call>", "no token"])
    assert tokenizer.token_name(end) == "<|im_end|>"
