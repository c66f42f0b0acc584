"""The tokenizer equals that of transformers wherever both have a function."""

from __future__ import annotations

import json

import pytest
from client_tokenizers import CHATML, KINDS, TEXTS, load, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from eagleray.client.text.tokenizer import Tokenizer
from eagleray.errors import CheckpointError, ConfigError, InvalidRequest

ALL_KINDS = sorted(KINDS)
BYTE_KINDS = ["byte_level", "byte_level_with_bos", "byte_fallback", "unigram"]


def oracle(directory):
    return AutoTokenizer.from_pretrained(directory)


@pytest.fixture(scope="module", params=ALL_KINDS)
def pair(request, tmp_path_factory):
    """Our tokenizer and that of transformers, from the same directory."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True}
    directory = write_checkpoint(tmp_path_factory.mktemp(request.param), request.param, tokenizer_config=config)
    return Tokenizer.load(directory), oracle(directory)


@settings(max_examples=60, deadline=None)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(max_size=40)), add_special_tokens=st.booleans())
def test_encode_equals_transformers(pair, text, add_special_tokens):
    ours, theirs = pair
    assert ours.encode(text, add_special_tokens=add_special_tokens) == theirs.encode(
        text, add_special_tokens=add_special_tokens
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), skip_special_tokens=st.booleans())
def test_decode_equals_transformers(pair, data, skip_special_tokens):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    ids = data.draw(st.lists(st.integers(0, ours.vocab_size - 1), max_size=12))
    assert ours.decode(ids, skip_special_tokens=skip_special_tokens) == theirs.decode(
        ids, skip_special_tokens=skip_special_tokens
    )


@pytest.mark.parametrize("kind", BYTE_KINDS)
def test_token_bytes_join_to_text(kind):
    tokenizer = load(kind)
    for text in [*TEXTS, "\x00\x7f", "�"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(map(tokenizer.token_bytes, ids)).decode()
        assert spelled.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_token_to_text_joins_to_text(kind):
    tokenizer = load(kind)
    ids = tokenizer.encode("hello the dog", add_special_tokens=False)
    text = "".join(map(tokenizer.token_to_text, ids))
    assert text.removeprefix(" ") == tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.token_to_text(10**6) == ""
    assert tokenizer.token_bytes(10**6) == b""


def test_token_to_text_special_token_has_text():
    tokenizer = load("byte_fallback")
    assert tokenizer.token_to_text(1) == "<s>"
    assert tokenizer.decode([1, 2], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": {
                "eos_token": "<|im_end|>",
                "pad_token": {"__type": "AddedToken", "content": "<|new_pad|>", "lstrip": True},
                "additional_special_tokens": ["<|new_one|>", "<tool_call>"],
            }
        },
        {
            "tokenizer_config": {"eos_token": "<|im_end|>"},
            "special_tokens_map": {
                "bos_token": {"content": "<|new_bos|>", "lstrip": False, "rstrip": False, "normalized": False},
                "additional_special_tokens": ["<|new_one|>"],
            },
            "added_tokens": {"<|late|>": 999, "<tool_call>": 5},
        },
        {
            "tokenizer_config": {
                "eos_token": "<|new_eos|>",
                "added_tokens_decoder": {
                    "405": {"content": "plain new", "special": False, "normalized": False},
                    "404": {"content": "<|new_eos|>", "special": True, "normalized": False},
                },
            },
            "special_tokens_map": {"bos_token": "<|unread|>"},
        },
    ],
    ids=["config", "older files", "decoder"],
)
def test_load_adds_tokens_of_other_files(files, tmp_path):
    files["tokenizer_config"]["tokenizer_class"] = "PreTrainedTokenizerFast"
    directory = write_checkpoint(tmp_path, **files)
    ours, theirs = Tokenizer.load(directory), oracle(directory)
    text = "a<|new_pad|> <|new_one|>b<|late|>c plain new<|new_eos|> <|new_bos|><tool_call><|im_end|><|unread|>"
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_load_gives_named_tokens_to_chat_template(tmp_path):
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        "bos_token": "<|endoftext|>",
        "image_token": "<|im_start|>",
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ image_token }}{{ unk_token }}",
    }
    directory = write_checkpoint(tmp_path, tokenizer_config=config)
    messages = [{"role": "user", "content": "hi"}]
    text = Tokenizer.load(directory).apply_chat_template(messages, add_generation_prompt=False)
    assert text == "<|endoftext|>hi<|im_end|><|im_start|>"
    assert text == oracle(directory).apply_chat_template(messages, tokenize=False)


def test_load_template_file_wins_over_config_and_override_over_both(tmp_path):
    directory = write_checkpoint(tmp_path, tokenizer_config={"chat_template": "from the config"})
    messages = [{"role": "user", "content": "hi"}]

    def rendered(**options):
        return Tokenizer.load(directory, **options).apply_chat_template(messages, add_generation_prompt=True)

    assert rendered() == "from the config"
    (directory / "chat_template.jinja").write_text(CHATML)
    assert rendered() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "mine.jinja").write_text("mine")
    assert rendered(chat_template=tmp_path / "mine.jinja") == "mine"
    with pytest.raises(ConfigError, match=r"other\.jinja.* is not a file"):
        rendered(chat_template=tmp_path / "other.jinja")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [7, 8]}, "config": {"eos_token_id": 9}}, (7, 8)),
        ({"generation_config": {"eos_token_id": 7}}, (7,)),
        ({"generation_config": {}, "config": {"eos_token_id": 9}}, (9,)),
        ({"tokenizer_config": {"eos_token": "</s>"}}, (2,)),
        ({}, ()),
    ],
)
def test_load_eos_token_ids_come_from_first_file_that_has_some(files, expected, tmp_path):
    assert Tokenizer.load(write_checkpoint(tmp_path, "byte_fallback", **files)).eos_token_ids == expected


def test_load_damaged_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not found.*skip_tokenizer_init"):
        Tokenizer.load(tmp_path)
    directory = write_checkpoint(tmp_path)
    (directory / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: cannot be read as JSON"):
        Tokenizer.load(directory)
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold a JSON object, but holds a list"):
        Tokenizer.load(directory)
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": 5}))
    with pytest.raises(CheckpointError, match="chat_template must be"):
        Tokenizer.load(directory)
    for wrong in (
        {"added_tokens_decoder": {"5": "x"}},
        {"added_tokens_decoder": {"five": {"content": "x"}}},
        {"added_tokens_decoder": [1]},
        {"additional_special_tokens": 5},
        {"extra_special_tokens": [[]]},
        {"chat_template": [{}]},
        {"chat_template": [{"name": "default", "template": 5}]},
    ):
        (directory / "tokenizer_config.json").write_text(json.dumps(wrong))
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: its tokens or chat templates"):
            Tokenizer.load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer.load(directory)
    for wrong in ("x", -1, 2**31, True, 1.5, [1] * 2000, [[]], {}):
        directory = write_checkpoint(tmp_path, generation_config={"eos_token_id": wrong})
        with pytest.raises(CheckpointError, match="eos_token_id must be"):
            Tokenizer.load(directory)


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", DEEP),
        ("tokenizer.json", "null"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}, "added_tokens": []}'),
        ("tokenizer_config.json", DEEP),
        ("tokenizer_config.json", '{"a": 1' + "0" * 5000 + "}"),
        ("generation_config.json", DEEP),
        ("generation_config.json", '{"eos_token_id": ' + DEEP),
        ("config.json", DEEP),
        ("chat_template.jinja", "\udcff"),
        ("added_tokens.json", '{"x": "y"}'),
        ("added_tokens.json", '{"x": Infinity}'),
        ("special_tokens_map.json", "5"),
    ],
)
def test_load_nonsense_in_any_file_raises_one_sentence(tmp_path, name, content):
    directory = write_checkpoint(tmp_path)
    (directory / name).write_text(content, errors="surrogateescape")
    with pytest.raises(CheckpointError) as caught:
        Tokenizer.load(directory)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_load_too_large_file_is_not_read(tmp_path):
    directory = write_checkpoint(tmp_path)
    for name, limit in (("tokenizer.json", 128), ("tokenizer_config.json", 32), ("chat_template.jinja", 32)):
        path = directory / name
        kept = path.read_bytes() if path.exists() else None
        with path.open("wb") as file:
            file.truncate(limit * 2**20 + 1)  # of zeros, and without a block on the disk
        with pytest.raises(CheckpointError, match=f"{limit}"):
            Tokenizer.load(directory)
        path.unlink() if kept is None else path.write_bytes(kept)


def test_encode_and_decode_invalid_input_raises():
    tokenizer = load("byte_level")
    with pytest.raises(InvalidRequest, match="surrogate"):
        tokenizer.encode("\ud800", add_special_tokens=True)
    with pytest.raises(InvalidRequest, match="NoneType"):
        tokenizer.encode(None, add_special_tokens=True)
    for wrong in ([-1], [2**40], ["a"]):
        with pytest.raises(InvalidRequest, match="token ids must be"):
            tokenizer.decode(wrong, skip_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("count", [1, 7, 60, 10**4])
def test_encode_part_of_a_long_text_is_a_part_of_all_its_tokens(kind, special, count):
    tokenizer = load(kind)
    text = " ".join(TEXTS * 40)
    ids = tokenizer.encode(text, add_special_tokens=special)

    def part(side):
        return tokenizer.encode_part(text, count, side=side, add_special_tokens=special)

    assert part("left") == ids[-count:]
    assert part("right") == ids[:count]
    plain = tokenizer.encode(text, add_special_tokens=False)
    num_special = len(ids) - len(plain)
    kept = part(None)
    assert len(kept) == min(count, len(ids))
    if count > num_special:
        begin = ids.index(plain[0]) if num_special else 0
        assert kept[:begin] == ids[:begin]  # what stands before every text
        assert kept[begin:] == ids[begin:][-(count - num_special) :]


def test_encode_part_of_a_text_without_room_is_empty():
    tokenizer = load("byte_level")
    for side in (None, "left", "right"):
        assert tokenizer.encode_part("hello", 0, side=side, add_special_tokens=False) == []


def test_token_name_is_the_spelling_of_the_vocabulary():
    tokenizer = load("byte_level")
    (again,) = tokenizer.encode(" again", add_special_tokens=False)[-1:]
    assert tokenizer.token_name(tokenizer.encode(" hello", add_special_tokens=False)[0]).startswith("Ġ")
    assert tokenizer.token_name(again) != ""
    assert tokenizer.token_name(10**6) == ""
