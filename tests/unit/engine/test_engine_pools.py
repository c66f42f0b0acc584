"""A whole engine with a pooling model: its vectors are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, make_pooling_checkpoint
from harness import LocalEngine
from oracle import oracle
from transformers import AutoModel, AutoModelForSequenceClassification

from eagleray.errors import ConfigError, InvalidRequest, PromptTooLong
from eagleray.messages.arrays import Array

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}

PROMPTS = [[5, 6, 7, 8, 9], list(range(3, 150)), [42], [*range(3, 40), 7], list(range(3, 40))]


@torch.inference_mode()
def hidden_states(checkpoint: Path, prompt: list[int]) -> Array:
    model = AutoModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model(torch.tensor([prompt])).last_hidden_state[0].numpy()


@torch.inference_mode()
def label_logits(checkpoint: Path, prompt: list[int]) -> Array:
    model = AutoModelForSequenceClassification.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return model(torch.tensor([prompt])).logits[0].numpy()


def pool(engine: LocalEngine, prompts: list[list[int]]) -> list[Array]:
    """Return the vectors of prompts that run together, and check that nothing is left of them."""
    engine.answers.clear()
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, max_tokens=1, pools=True)
    answers = engine.run()
    assert all(answer.finish_reason == "stop" and not answer.token_ids for answer in answers.values())
    stats = engine.core.scheduler.stats()
    assert stats.num_free_kv_blocks == stats.num_kv_blocks
    assert stats.num_generation_tokens == 0
    vectors = [answers[str(index)].pooled for index in range(len(prompts))]
    assert all(vector is not None and vector.dtype == np.float32 for vector in vectors)
    return vectors


def last(states: Array) -> Array:
    return states[-1]


def mean(states: Array) -> Array:
    return states.mean(axis=0)


def first(states: Array) -> Array:
    return states[0]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"is_prefixed": False}),
        ("mistral", {"is_prefixed": True}),
        ("qwen2", {"is_prefixed": False, "use_sliding_window": False}),
        ("qwen3", {"is_prefixed": False}),
        ("qwen3_moe", {"is_prefixed": False}),
    ],
)
def test_engine_last_token_pooled_in_chunks_equals_transformers(tmp_path: Path, family: str, options: dict[str, Any]):
    checkpoint = make_pooling_checkpoint(tmp_path, family, tokenizer=False, **options)
    engine = LocalEngine(checkpoint, max_num_batched_tokens=32, max_num_seqs=3)
    assert engine.info.pooling is not None
    assert engine.info.hidden_size == 64
    for prompt, vector in zip(PROMPTS, pool(engine, PROMPTS), strict=True):
        np.testing.assert_allclose(vector, last(hidden_states(checkpoint, prompt)), **TOLERANCE)


ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_GPU)])
@pytest.mark.parametrize(("mode", "expected"), [("mean", mean), ("cls", first), ("last", last)])
def test_engine_pooling_mode_of_modules_equals_transformers(tmp_path: Path, mode: str, expected: Any, device: str):
    checkpoint = make_pooling_checkpoint(tmp_path, "qwen3", tokenizer=False, modules={"Pooling": mode, "Normalize": ""})
    engine = LocalEngine(checkpoint, max_num_batched_tokens=32, max_num_seqs=3, device=device, executor="in-process")
    for _ in range(2):  # the second time the prefix cache could have the prompts
        for prompt, vector in zip(PROMPTS, pool(engine, PROMPTS), strict=True):
            np.testing.assert_allclose(vector, expected(hidden_states(checkpoint, prompt)), **TOLERANCE)
    assert (engine.core.scheduler.stats().num_prefix_hits > 0) == (mode == "last")


@pytest.mark.parametrize(("family", "num_labels"), [("qwen3", 1), ("llama", 3)])
def test_engine_classifier_equals_transformers(tmp_path: Path, family: str, num_labels: int):
    checkpoint = make_pooling_checkpoint(tmp_path, family, num_labels=num_labels, tokenizer=False)
    engine = LocalEngine(checkpoint, max_num_batched_tokens=64)
    assert engine.info.pooling is not None
    assert len(engine.info.pooling.labels) == num_labels
    for prompt, vector in zip(PROMPTS, pool(engine, PROMPTS), strict=True):
        np.testing.assert_allclose(vector, label_logits(checkpoint, prompt), **TOLERANCE)


def test_engine_generating_checkpoint_pools_with_runner_pooling(tmp_path: Path):
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    engine = LocalEngine(checkpoint, runner="pooling", pooler_config={"pooling_type": "MEAN"})
    for prompt, vector in zip(PROMPTS, pool(engine, PROMPTS), strict=True):
        np.testing.assert_allclose(vector, mean(hidden_states(checkpoint, prompt)), **TOLERANCE)


@pytest.mark.parametrize("family", ["qwen3", "llama"])  # with tied weights, and without
def test_engine_reranker_of_two_tokens_compares_their_logits(tmp_path: Path, family: str):
    checkpoint = make_checkpoint(tmp_path, family)
    overrides = {
        "architectures": [f"{family.capitalize()}ForSequenceClassification"],
        "classifier_from_token": ["a", "<|im_end|>"],
        "method": "from_2_way_softmax",
    }
    engine = LocalEngine(checkpoint, hf_overrides=overrides)
    assert engine.info.pooling is not None
    no, yes = engine.info.pooling.label_tokens
    for prompt, vector in zip(PROMPTS, pool(engine, PROMPTS), strict=True):
        logits = oracle(checkpoint).logits(prompt)[-1].numpy()
        np.testing.assert_allclose(vector, [logits[yes] - logits[no]], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.grid)])
def test_engine_of_several_workers_pools_as_one(tmp_path: Path, tp: int):
    checkpoint = make_pooling_checkpoint(tmp_path, "qwen3", num_labels=2, tokenizer=False)
    options = {"executor": "processes", "tensor_parallel_size": tp, "pipeline_parallel_size": 2}
    with LocalEngine(checkpoint, max_num_batched_tokens=64, **options) as engine:
        vectors = pool(engine, PROMPTS)
    for prompt, vector in zip(PROMPTS, vectors, strict=True):
        np.testing.assert_allclose(vector, label_logits(checkpoint, prompt), **TOLERANCE)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> LocalEngine:
    checkpoint = make_pooling_checkpoint(
        tmp_path_factory.mktemp("embedder"), "llama", tokenizer=False, max_position_embeddings=64
    )
    return LocalEngine(checkpoint, pooler_config={"pooling_type": "MEAN"}, max_num_batched_tokens=16, block_size=8)


def test_engine_prompt_of_full_length_is_pooled(embedder: LocalEngine):
    assert len(pool(embedder, [list(range(64))])) == 1


def test_engine_prompt_longer_than_model_is_refused(embedder: LocalEngine):
    with pytest.raises(PromptTooLong, match=r"length is 64 tokens\. The prompt is too long: it has 65 tokens"):
        embedder.add("long", [1] * 65, max_tokens=1, pools=True)


def test_engine_pooling_model_refuses_to_generate(embedder: LocalEngine):
    with pytest.raises(InvalidRequest, match="served for pooling and does not generate"):
        embedder.add("text", [1, 2], max_tokens=1)


def test_engine_preempted_prompt_is_pooled_from_its_start(embedder: LocalEngine):
    prompts = [list(range(1, 60)), list(range(2, 30))]
    alone = [pool(embedder, [prompt])[0] for prompt in prompts]
    for index, prompt in enumerate(prompts):
        embedder.add(str(index), prompt, max_tokens=1, pools=True)
    embedder.step()
    embedder.core.scheduler.preempt_all()
    answers = embedder.run()
    for index, vector in enumerate(alone):
        np.testing.assert_allclose(answers[str(index)].pooled, vector, rtol=1e-5, atol=1e-6)


def test_engine_aborted_prompt_leaves_no_sum_to_the_next(embedder: LocalEngine):
    prompt = list(range(1, 40))
    (alone,) = pool(embedder, [prompt])
    embedder.add("aborted", list(range(60, 2, -1)), max_tokens=1, pools=True)
    embedder.step()
    embedder.abort("aborted")
    del embedder.answers["aborted"]
    np.testing.assert_allclose(pool(embedder, [prompt])[0], alone, rtol=1e-5, atol=1e-6)


def test_engine_deterministic_refuses_the_mean(tmp_path: Path):
    checkpoint = make_pooling_checkpoint(tmp_path, "llama", tokenizer=False)
    LocalEngine(checkpoint, deterministic=True)
    with pytest.raises(ConfigError, match="option `deterministic`: the mean of a prompt's hidden states"):
        LocalEngine(checkpoint, deterministic=True, pooler_config={"pooling_type": "MEAN"})


def test_engine_generating_model_refuses_to_pool(tmp_path: Path):
    engine = LocalEngine(make_checkpoint(tmp_path, "llama", tokenizer=False))
    with pytest.raises(InvalidRequest, match="start it with `--runner pooling`"):
        engine.add("text", [1, 2], max_tokens=1, pools=True)


def test_engine_model_without_head_refuses_runner_generate(tmp_path: Path):
    checkpoint = make_pooling_checkpoint(tmp_path, "llama", tokenizer=False)
    with pytest.raises(ConfigError, match="LlamaModel has no head that predicts tokens"):
        LocalEngine(checkpoint, runner="generate")
