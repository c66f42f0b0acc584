"""A checkpoint that takes the place of another one."""

from __future__ import annotations

import json

import pytest
from checkpoints import make_checkpoint

from eagleray.config.sections import ModelConfig
from eagleray.errors import InvalidRequest
from eagleray.hub.replacement import prepare_replacement


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("first"), "qwen3")


@pytest.fixture
def second(tmp_path):
    return make_checkpoint(tmp_path / "second", "qwen3")


def prepare(first, second):
    changes = {"model": str(second), "max_num_seqs": 3}
    return prepare_replacement(ModelConfig(model=str(first), revision=None), changes)


def change(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_replacement_is_pinned_to_an_absolute_directory(first, second, monkeypatch):
    monkeypatch.chdir(second.parent)
    expected = {"model": str(second), "revision": None, "max_num_seqs": 3}
    assert prepare(first, second.name) == expected
    change(second / "tokenizer.json", padding=None, version="2.0")
    assert prepare(first, second) == expected
    (second / "tokenizer.json").unlink()
    assert prepare(first, second) == expected, "the tokenizer of the start is used"


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("config.json", {"architectures": ["LlamaForCausalLM"]}, "`architectures` in config.json is"),
        ("config.json", {"vocab_size": 17}, "`vocab_size` in config.json is 17, but the running model has"),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, "the tokenizer is not that of the running model"),
        ("model.safetensors", None, r"model.safetensors: not found"),
        ("config.json", None, r"config.json"),
    ],
)
def test_replacement_that_does_not_fit_is_refused(first, second, name, fields, message):
    if fields is None:
        (second / name).unlink()
    else:
        change(second / name, **fields)
    with pytest.raises(InvalidRequest, match=message) as error:
        prepare(first, second)
    assert error.value.param == "model"


def test_replacement_that_does_not_exist_is_refused(first, tmp_path):
    with pytest.raises(InvalidRequest, match="there is no such directory"):
        prepare(first, tmp_path / "nowhere")
