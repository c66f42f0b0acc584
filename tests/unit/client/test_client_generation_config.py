from __future__ import annotations

import json

import pytest

from eagleray.client.text.generation_config import default_sampling
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def write(**fields):
        (tmp_path / "generation_config.json").write_text(json.dumps(fields))
        return str(tmp_path)

    return write


def test_default_sampling_renames_fields_of_generation_config(checkpoint):
    fields = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 99,
        "do_sample": False,
        "eos_token_id": [1, 2],
    }
    assert default_sampling(ModelConfig(model=checkpoint(**fields))) == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_tokens": 99,
    }


def test_default_sampling_unwanted_or_missing_file_is_empty(checkpoint, tmp_path):
    assert default_sampling(ModelConfig(model=checkpoint(temperature=None))) == {}
    assert default_sampling(ModelConfig(model=checkpoint(temperature=0.6), generation_config="none")) == {}
    (tmp_path / "generation_config.json").unlink()
    assert default_sampling(ModelConfig(model=str(tmp_path))) == {}


def test_default_sampling_invalid_value_names_file(checkpoint):
    with pytest.raises(CheckpointError, match=r"generation_config\.json: `top_p` must be .*none ignores"):
        default_sampling(ModelConfig(model=checkpoint(top_p=7)))
