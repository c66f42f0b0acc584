from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoints import write_tokenizer
from tokenizers import Tokenizer

from eagleray.config.pooling_spec import PoolingSpec
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError
from eagleray.hub.pooling import find_pooling

EMBEDS = PoolingSpec(kind="embed", method="last", activation="normalize")


def find(directory: Path, fields: dict[str, Any], **options: Any) -> PoolingSpec | None:
    (directory / "config.json").write_text(json.dumps(fields))
    return find_pooling(ModelConfig(model=str(directory), **options))


def write_modules(directory: Path, pooling: dict[str, Any], *kinds: str) -> None:
    entries = [{"type": f"sentence_transformers.models.{kind}", "path": kind} for kind in ("Transformer", *kinds)]
    (directory / "modules.json").write_text(json.dumps(entries))
    (directory / "Pooling").mkdir()
    (directory / "Pooling" / "config.json").write_text(json.dumps(pooling))


def architecture(name: str) -> dict[str, Any]:
    return {"architectures": [name]}


def test_find_pooling_generating_architecture_is_none(tmp_path: Path):
    assert find(tmp_path, architecture("Qwen3ForCausalLM")) is None
    assert find(tmp_path, {}) is None


def test_find_pooling_architecture_without_token_head_pools(tmp_path: Path):
    assert find(tmp_path, architecture("MistralModel")) == EMBEDS
    labels = ("LABEL_0", "LABEL_1")
    assert find(tmp_path, architecture("LlamaForSequenceClassification")) == PoolingSpec(
        kind="classify", method="last", activation="softmax", labels=labels
    )


@pytest.mark.parametrize("options", [{"runner": "pooling"}, {"convert": "embed"}])
def test_find_pooling_option_converts_generating_architecture(tmp_path: Path, options: dict[str, Any]):
    assert find(tmp_path, architecture("Qwen3ForCausalLM"), **options) == EMBEDS


def test_find_pooling_convert_embed_leaves_label_head_out(tmp_path: Path):
    assert find(tmp_path, architecture("Qwen3ForSequenceClassification"), convert="embed") == EMBEDS


@pytest.mark.parametrize(
    ("pooling", "method"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_find_pooling_modules_name_method_and_normalization(tmp_path: Path, pooling: dict[str, Any], method: str):
    write_modules(tmp_path, pooling, "Pooling")
    spec = find(tmp_path, architecture("Qwen3ForCausalLM"))
    assert spec == PoolingSpec(kind="embed", method=method, activation="none")


def test_find_pooling_runner_generate_overrules_modules(tmp_path: Path):
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, "Pooling", "Normalize")
    assert find(tmp_path, architecture("Qwen3ForCausalLM")) == EMBEDS
    assert find(tmp_path, architecture("Qwen3ForCausalLM"), runner="generate") is None


@pytest.mark.parametrize(
    ("pooling", "kinds", "message"),
    [
        ({"pooling_mode_max_tokens": True}, ["Pooling"], "must name one of the modes"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ["Pooling"], "must name one of the modes"),
        ({}, ["Pooling"], "names none"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, ["Pooling"], "`include_prompt` false"),
        ({"pooling_mode_mean_tokens": True}, ["Pooling", "Dense"], "models.Dense' is not supported"),
    ],
)
def test_find_pooling_unsupported_modules_are_refused(
    tmp_path: Path, pooling: dict[str, Any], kinds: list[str], message: str
):
    write_modules(tmp_path, pooling, *kinds)
    with pytest.raises(CheckpointError, match=message):
        find(tmp_path, architecture("Qwen3ForCausalLM"))


@pytest.mark.parametrize("content", ["{", "{}", '["a"]', "[" * 100_000])
def test_find_pooling_damaged_modules_are_refused(tmp_path: Path, content: str):
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules.json: must hold a JSON list"):
        find(tmp_path, architecture("Qwen3ForCausalLM"))


@pytest.mark.parametrize(
    ("fields", "activation", "labels"),
    [
        ({"num_labels": 1}, "sigmoid", ("LABEL_0",)),
        ({"id2label": {"0": "no", "1": "yes"}}, "softmax", ("no", "yes")),
        ({"id2label": {"0": "no"}, "problem_type": "regression"}, "none", ("no",)),
        ({"num_labels": 2, "problem_type": "multi_label_classification"}, "sigmoid", ("LABEL_0", "LABEL_1")),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "none",
            ("LABEL_0",),
        ),
    ],
)
def test_find_pooling_classifier_has_labels_and_activation(
    tmp_path: Path, fields: dict[str, Any], activation: str, labels: tuple[str, ...]
):
    spec = find(tmp_path, architecture("Qwen3ForSequenceClassification") | fields)
    assert spec is not None
    assert (spec.activation, spec.labels) == (activation, labels)


@pytest.mark.parametrize(
    "fields", [{"num_labels": 0}, {"num_labels": 10**9}, {"id2label": {"1": "a"}}, {"id2label": []}]
)
def test_find_pooling_wrong_labels_are_refused(tmp_path: Path, fields: dict[str, Any]):
    with pytest.raises(CheckpointError, match="label"):
        find(tmp_path, architecture("Qwen3ForSequenceClassification") | fields)


def test_find_pooling_matryoshka_fields_are_read(tmp_path: Path):
    spec = find(tmp_path, architecture("Qwen3Model") | {"matryoshka_dimensions": [32, 64]})
    assert spec is not None
    assert (spec.is_matryoshka, spec.matryoshka_dimensions) == (True, (32, 64))


def test_find_pooling_folder_outside_of_the_checkpoint_is_refused(tmp_path: Path):
    write_modules(tmp_path, {"pooling_mode_lasttoken": True})
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "models.Pooling", "path": "../other"}]))
    with pytest.raises(CheckpointError, match="outside of the checkpoint"):
        find(tmp_path, architecture("Qwen3ForCausalLM"))


ORIGINAL = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["a", "<|im_end|>"],
    "is_original_qwen3_reranker": True,
}
"""What vLLM's users give as `hf_overrides` for a reranker that is stored with the head that predicts tokens."""


def test_find_pooling_tokens_make_the_head_of_a_reranker(tmp_path: Path):
    write_tokenizer(tmp_path, vocab_size=300)
    spec = find(tmp_path, architecture("Qwen3ForCausalLM"), hf_overrides=ORIGINAL)
    assert spec is not None
    assert (spec.kind, spec.activation, spec.labels) == ("classify", "sigmoid", ("LABEL_0",))
    assert spec.label_tokens == (Tokenizer.from_file(str(tmp_path / "tokenizer.json")).token_to_id("a"), 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"classifier_from_token": ["a", "no such token"]}, "'no such token' is not a token of"),
        ({"classifier_from_token": "a"}, "must be a list of tokens"),
        ({"classifier_from_token": ["a"]}, "with 1 tokens"),
        ({"is_original_qwen3_reranker": None}, "`method` is None with 2 tokens"),
    ],
)
def test_find_pooling_wrong_tokens_of_a_reranker_are_refused(tmp_path: Path, changes: dict[str, Any], message: str):
    write_tokenizer(tmp_path, vocab_size=300)
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, architecture("Qwen3ForCausalLM"), hf_overrides=ORIGINAL | changes)


def test_find_pooling_pooler_config_overrules_modules(tmp_path: Path):
    write_modules(tmp_path, {"pooling_mode_lasttoken": True}, "Pooling", "Normalize")
    config = {"pooling_type": "MEAN", "use_activation": False, "dimensions": None}
    spec = find(tmp_path, architecture("Qwen3ForCausalLM"), pooler_config=config)
    assert spec == PoolingSpec(kind="embed", method="mean", activation="none")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Qwen3Model", {"runner": "generate"}, "has no head that predicts tokens"),
        ("Qwen3ForCausalLM", {"runner": "generate", "convert": "embed"}, "embed is for the runner pooling"),
        ("Qwen3ForCausalLM", {"convert": "classify"}, "needs a checkpoint with a `score` head"),
        ("Qwen3ForCausalLM", {"runner": "pooling", "convert": "none"}, "only generates"),
        ("Qwen3Model", {"pooler_config": {"pooling_type": "MAX"}}, "pooling_type 'MAX' is not supported"),
        ("Qwen3Model", {"pooler_config": {"task": "classify"}}, "its task is 'classify', but the model's is embed"),
    ],
)
def test_find_pooling_impossible_options_are_refused(tmp_path: Path, name: str, options: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, architecture(name), **options)
