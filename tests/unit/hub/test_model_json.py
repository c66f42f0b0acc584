"""Changes of config.json and generation_config.json by options."""

from __future__ import annotations

import json

import pytest

from eagleray.client.text.generation_config import default_sampling, model_eos_token_ids
from eagleray.config.build import build_config
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.model_json import config_file, merged, read_config

CONFIG = {"hidden_size": 8, "eos_token_id": 1, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}


@pytest.fixture
def model(tmp_path):
    def make(generation=None, **options):
        directory = tmp_path / "model"
        directory.mkdir(exist_ok=True)
        (directory / "config.json").write_text(json.dumps(CONFIG))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        return ModelConfig(model=str(directory), **options)

    return make


def test_merged_objects_are_merged_and_null_removes():
    fields = {"a": 1, "b": {"c": 2, "d": 3}, "e": [1, 2], "f": {"g": 1}}
    overrides = {"a": None, "b": {"c": {"x": 1}, "h": 5}, "e": [3], "f": 7, "new": {"y": 1}}
    assert merged(fields, overrides) == {"b": {"c": {"x": 1}, "d": 3, "h": 5}, "e": [3], "f": 7, "new": {"y": 1}}
    assert fields["b"] == {"c": 2, "d": 3}


def test_read_config_has_the_overrides(model):
    overrides = {"hidden_size": 16, "rope_scaling": {"factor": 4.0}}
    assert read_config(model(hf_overrides=overrides)) == {
        "hidden_size": 16,
        "eos_token_id": 1,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    }


def test_read_config_of_another_directory(model, tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    other = model(hf_config_path=str(tmp_path))
    assert read_config(other) == {"hidden_size": 4}
    assert config_file(other) == tmp_path / "config.json"


def test_config_file_missing_is_named(model, tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json: not found"):
        config_file(model(hf_config_path=str(tmp_path)))


def test_hf_overrides_from_the_command_line_are_json():
    assert build_config(hf_overrides='{"a": {"b": 1}}').model.hf_overrides == {"a": {"b": 1}}
    with pytest.raises(ConfigError, match="`hf_overrides`: expected"):
        build_config(hf_overrides="[1]")
    with pytest.raises(ConfigError, match="`hf_overrides`: expected"):
        build_config(hf_overrides="a=1")


def test_default_sampling_has_the_overrides(model):
    file = {"temperature": 0.6, "top_k": 20}
    assert default_sampling(model(file, override_generation_config={"temperature": 1.0, "max_new_tokens": 9})) == {
        "temperature": 1.0,
        "top_k": 20,
        "max_tokens": 9,
    }
    assert default_sampling(model(file, override_generation_config={"top_k": None})) == {"temperature": 0.6}


def test_default_sampling_overrides_without_the_file(model):
    options = {"generation_config": "none", "override_generation_config": {"temperature": 0.1}}
    assert default_sampling(model({"top_k": 20}, **options)) == {"temperature": 0.1}


def test_default_sampling_of_another_directory(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"top_p": 0.5, "eos_token_id": [5]}')
    other = model({"top_k": 20}, generation_config=str(tmp_path))
    assert default_sampling(other) == {"top_p": 0.5}
    assert model_eos_token_ids(other) == (5,)


def test_default_sampling_directory_without_the_file_is_refused(model, tmp_path):
    with pytest.raises(ConfigError, match="must be auto, none, or a directory with"):
        default_sampling(model(generation_config=str(tmp_path)))


def test_default_sampling_invalid_override_names_the_option(model):
    with pytest.raises(ConfigError, match="option `override_generation_config`: `top_p` must be"):
        default_sampling(model(override_generation_config={"top_p": 7}))


def test_model_eos_token_ids_have_the_overrides(model):
    assert model_eos_token_ids(model()) == (1,)
    assert model_eos_token_ids(model(hf_overrides={"eos_token_id": 3})) == (3,)
    assert model_eos_token_ids(model({"eos_token_id": 2}, generation_config="none")) == (2,)
    assert model_eos_token_ids(model({"eos_token_id": 2}, override_generation_config={"eos_token_id": [4]})) == (4,)
