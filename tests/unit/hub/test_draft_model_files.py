"""A draft model is found as the model is: a directory, or an id in the cache."""

from __future__ import annotations

import json

import pytest
from hub_fakes import COMMIT, OTHER_COMMIT, write_snapshot

from eagleray.config.build import build_config
from eagleray.config.sections import ModelConfig
from eagleray.config.speculation import speculation
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.draft_model import fetch_draft_model, find_draft_model
from eagleray.hub.locate import checkpoint_dir
from eagleray.preflight import checked_config

MODEL = ModelConfig(model="/none", tokenizer="/tokens", hf_overrides={"vocab_size": 7}, quantization="fp8")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def drafts(**fields):
    options = speculation({"model": "org/model", "num_speculative_tokens": 3, **fields})
    assert options is not None
    return options


def test_find_draft_model_in_the_cache_is_pinned_and_has_options_of_its_own(cache):
    snapshot = write_snapshot(cache)
    other = write_snapshot(cache, commit=OTHER_COMMIT, revision="old")
    found = fetch_draft_model(MODEL, drafts(quantization="int8"), timeout=1.0)
    assert (found.revision, checkpoint_dir(found), found.quantization) == (COMMIT, snapshot, "int8")
    assert found.tokenizer is None and not found.hf_overrides
    assert checkpoint_dir(find_draft_model(MODEL, drafts(revision="old"))) == other


def test_find_draft_model_that_is_nowhere_is_refused(cache):
    with pytest.raises(CheckpointError, match="org/model"):
        find_draft_model(MODEL, drafts())
    with pytest.raises(CheckpointError, match="draft model '/none': there is no such directory"):
        find_draft_model(MODEL, drafts(model="/none"))


def test_checked_config_draft_model_of_another_vocabulary_is_refused_before_the_start(tmp_path, cache):
    write_snapshot(cache)
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 7}))
    options = {"model": "org/model", "num_speculative_tokens": 3}
    with pytest.raises(ConfigError, match="must have the vocabulary of the model"):
        checked_config(build_config(model=str(tmp_path), speculative_config=options))
