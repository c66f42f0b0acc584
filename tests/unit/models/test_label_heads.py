"""Heads of classifiers, and their weights from a trainer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, make_pooling_checkpoint
from model_runs import load
from safetensors.torch import load_file

from eagleray.config.pooling_spec import PoolingSpec

POOLED = torch.linspace(-1, 1, 128).reshape(2, 64)


def classifier(labels: int, *tokens: int) -> PoolingSpec:
    names = tuple(map(str, range(labels)))
    return PoolingSpec(kind="classify", method="last", activation="none", labels=names, label_tokens=tokens)


def test_label_head_of_its_own_takes_new_weights(tmp_path: Path):
    checkpoint = make_pooling_checkpoint(tmp_path, "llama", num_labels=3, tokenizer=False)
    model = load(checkpoint, pooling=classifier(3))
    weight = load_file(checkpoint / "model.safetensors")["score.weight"]
    torch.testing.assert_close(model.score(POOLED), POOLED @ weight.T)
    assert model.load_weights([("score.weight", 2 * weight)]) == {"score.weight"}
    torch.testing.assert_close(model.score(POOLED), 2 * POOLED @ weight.T)


def test_label_head_numbers_of_a_row_do_not_depend_on_the_others(tmp_path: Path):
    checkpoint = make_pooling_checkpoint(tmp_path, "llama", num_labels=3, tokenizer=False)
    model = load(checkpoint, pooling=classifier(3))
    rows = torch.randn(33, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.score(rows), torch.cat([model.score(row[None]) for row in rows]))


@pytest.mark.parametrize(("family", "name"), [("llama", "lm_head.weight"), ("qwen3", "model.embed_tokens.weight")])
def test_label_head_of_two_tokens_takes_new_weights(tmp_path: Path, family: str, name: str):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    model = load(checkpoint, pooling=classifier(1, 20, 7))
    weight = load_file(checkpoint / "model.safetensors")[name]
    torch.testing.assert_close(model.score(POOLED), POOLED @ (weight[7] - weight[20])[:, None])
    assert model.load_weights([(name, 2 * weight)]) == {name}
    torch.testing.assert_close(model.score(POOLED), 2 * POOLED @ (weight[7] - weight[20])[:, None])


def test_label_head_of_tokens_without_difference_has_their_logits(tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    model = load(checkpoint, pooling=classifier(3, 9, 4, 30))
    weight = load_file(checkpoint / "model.safetensors")["lm_head.weight"]
    torch.testing.assert_close(model.score(POOLED), POOLED @ weight[[9, 4, 30]].T)


def test_model_without_label_head_scores_the_states_themselves(tmp_path: Path):
    model = load(
        make_pooling_checkpoint(tmp_path, "llama", tokenizer=False),
        pooling=PoolingSpec(kind="embed", method="last", activation="normalize"),
    )
    torch.testing.assert_close(model.score(POOLED), POOLED)
    assert "lm_head.weight" not in model.names()
