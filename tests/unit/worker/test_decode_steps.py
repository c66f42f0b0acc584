"""Steps by one call of the kernels, against steps by their parts: equal tokens, log-probabilities and caches."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from harness import Answer, LocalEngine, random_prompt
from safetensors.torch import load_file, save_file

from eagleray.kernels.cpu.ranking import NativeRanking
from eagleray.kernels.ranking import Ranking
from eagleray.models.base import Model

VOCAB_SIZE = 384
NAN_TOKEN = 7
INFINITE_TOKEN = 9

REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 40},
    {"max_tokens": 21, "temperature": 0.8, "seed": 3},
    {"max_tokens": 33, "temperature": 1.5, "seed": -1, "min_p": 0.05},
    {"max_tokens": 9, "temperature": 1e30, "seed": 2**63},
    {"max_tokens": 12, "temperature": 1.0, "seed": 5, "top_k": 1},
    {"max_tokens": 26, "temperature": 1.0, "seed": 6, "top_k": 20, "top_p": 0.95},
    {"max_tokens": 25, "temperature": 1.0, "seed": 7, "top_p": 0.7},
    {"max_tokens": 6, "logprobs": 3},
    {"max_tokens": 5, "temperature": 0.7, "seed": 8, "repetition_penalty": 1.3},
    {"max_tokens": 4, "logit_bias": {11: 4.0}, "allowed_token_ids": (9, 10, 11)},
    {"max_tokens": 7, "min_tokens": 6, "suppressed_token_ids": (2,), "bad_words": ((3,), (4, 5))},
    {"max_tokens": 5, "forced_token_ids": (9, 8, 7)},
    {"max_tokens": 30, "prompt_logprobs": 1},
]
"""The sampling of requests that come one after the other. Those that need the sampler end early, so that many steps
have none of them."""


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the decode steps: `whole` ones take a single native call, the others run `by parts`."""
    counter: Counter[str] = Counter()
    decode = Model.decode

    def counted(*arguments: Any) -> list[int] | None:
        token_ids = decode(*arguments)
        counter["by parts" if token_ids is None else "whole"] += 1
        return token_ids

    monkeypatch.setattr(Model, "decode", counted)
    return counter


def start(checkpoint: Path, **options: Any) -> LocalEngine:
    scheduling = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "num_kv_blocks": 160, "max_model_len": 128}
    return LocalEngine(checkpoint, block_size=4, **{**scheduling, **options})


def answers(engine: LocalEngine) -> dict[str, Answer]:
    """Run all requests, of which more wait than there are rows, then continue their texts with log-probabilities, which
    depend on the cached keys and values of every token."""
    for index, sampling in enumerate(REQUESTS):
        engine.add(str(index), random_prompt(index, 5 + 3 * index, VOCAB_SIZE), **sampling)
        for _ in range(3):
            engine.step()
    engine.run()
    for index in range(len(REQUESTS)):
        known = random_prompt(index, 5 + 3 * index, VOCAB_SIZE) + engine.answers[str(index)].token_ids
        engine.add(f"{index} continued", known, max_tokens=2, logprobs=5)
    found = engine.run()
    assert all(found[f"{index} continued"].num_cached_tokens for index in range(len(REQUESTS)))
    return found


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, answer in found.items():
        other = expected[name]
        assert (answer.token_ids, answer.finish_reason) == (other.token_ids, other.finish_reason), name
        assert answer.logprobs == other.logprobs, name
        assert len(answer.prompt_logprobs) == len(other.prompt_logprobs), name
        for one, another in zip(answer.prompt_logprobs, other.prompt_logprobs, strict=True):
            np.testing.assert_array_equal(one.logprobs, another.logprobs)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("qwen3", {"dtype": "bfloat16", "quantization": "int8", "num_threads": 2}),
        ("qwen3_moe", {}),
        ("gpt_oss", {}),
        ("deepseek_v2", {}),
        ("qwen3", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
)
def test_decode_steps_give_the_numbers_of_their_parts(family, options, tmp_path, taken, monkeypatch):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, vocab_size=VOCAB_SIZE)
    with start(checkpoint, **options) as engine:
        found = answers(engine)
    assert taken["whole"] > 20 and taken["by parts"] > 5
    monkeypatch.setattr(Model, "decode", lambda *_: None)
    with start(checkpoint, **options) as engine:
        assert_equal(found, answers(engine))


def test_decode_step_after_preemptions_and_aborts_gives_the_tokens_of_requests_alone(tmp_path, taken):
    checkpoint = make_checkpoint(tmp_path, "qwen3", tokenizer=False, vocab_size=VOCAB_SIZE)
    prompts = [random_prompt(seed, 30, VOCAB_SIZE) for seed in range(6)]

    def add(engine: LocalEngine, index: int) -> None:
        restriction = {"top_k": 20, "top_p": 0.95} if index % 2 else {}
        engine.add(str(index), prompts[index], max_tokens=40, temperature=0.5 * (index % 3), seed=index, **restriction)

    with start(checkpoint, num_kv_blocks=40) as engine:
        for index in range(6):
            add(engine, index)
        for _ in range(20):
            engine.step()
        engine.abort("5")
        together = engine.run()
    assert taken["whole"] > 20
    for index in range(5):
        with start(checkpoint) as engine:
            add(engine, index)
            assert engine.run()[str(index)].token_ids == together[str(index)].token_ids


RESTRICTIONS: list[dict[str, Any]] = [
    {"top_k": 20, "top_p": 0.95},
    {"top_k": 1},
    {"top_k": 2, "seed": -5},
    {"top_k": 256},
    {"top_k": 257, "top_p": 0.99},
    {"top_k": 10_000, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 5, "min_p": 0.3},
    {"top_p": 1e-12},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 0.9, "temperature": 0.6},
    {"top_p": 0.9999999},
    {"top_k": 50, "temperature": 1e30},
    {},
    {"temperature": 0.0},
]
"""The sampling of requests whose steps are all native, in mixed batches."""


def make_checkpoint_with_equal_logits(directory: Path, vocab_size: int) -> Path:
    """Make a checkpoint whose logits are equal for four tokens each, so that a top_k or top_p often ends among them."""
    checkpoint = make_checkpoint(
        directory, "qwen3", tokenizer=False, vocab_size=vocab_size, tie_word_embeddings=False, initializer_range=0.2
    )
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    head = weights["lm_head.weight"]
    weights["lm_head.weight"] = head[: len(head) // 4].repeat(4, 1)
    save_file(weights, path, metadata={"format": "pt"})
    return checkpoint


@pytest.mark.parametrize("vocab_size", [256, VOCAB_SIZE, 4800])
def test_decode_step_with_top_k_and_top_p_draws_the_tokens_of_plain_torch(vocab_size, tmp_path, taken, monkeypatch):
    checkpoint = make_checkpoint_with_equal_logits(tmp_path, vocab_size)

    def run() -> dict[str, Answer]:
        with start(checkpoint, num_kv_blocks=400, max_num_batched_tokens=256) as engine:
            for index, restriction in enumerate(RESTRICTIONS):
                prompt = random_prompt(index, 5 + index, vocab_size)
                engine.add(str(index), prompt, max_tokens=60, **{"temperature": 1.0, "seed": index, **restriction})
            return engine.run()

    found = run()
    assert taken["whole"] > 100 and taken["by parts"] <= 1, "one step has the tables of positions extended"
    assert sum(len(set(answer.token_ids)) for answer in found.values()) > 200, "draws differ from step to step"
    monkeypatch.setattr(Model, "decode", lambda *_: None)
    assert_equal(run(), found)
    monkeypatch.setattr(NativeRanking, "draw", Ranking.draw)
    assert_equal(run(), found)


def make_broken_checkpoint(directory: Path) -> Path:
    """Make a checkpoint that has no finite logits behind `NAN_TOKEN`, and whose logit of `INFINITE_TOKEN` is infinity
    behind half of the other tokens, and minus infinity behind the others."""
    checkpoint = make_checkpoint(directory, "qwen3", tokenizer=False, vocab_size=VOCAB_SIZE, tie_word_embeddings=False)
    path = checkpoint / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][NAN_TOKEN] = torch.nan
    weights["lm_head.weight"][INFINITE_TOKEN] = 0
    weights["lm_head.weight"][INFINITE_TOKEN, 0] = torch.inf
    save_file(weights, path, metadata={"format": "pt"})
    return checkpoint


def test_decode_step_fails_a_row_without_finite_logits_and_no_other(tmp_path, taken, monkeypatch):
    checkpoint = make_broken_checkpoint(tmp_path)
    samplings: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 20, "top_p": 0.95}]

    def run() -> dict[str, Answer]:
        with start(checkpoint, max_num_seqs=64, max_num_batched_tokens=256) as engine:
            for index, sampling in enumerate(samplings * 16):
                engine.add(str(index), random_prompt(index, 4, NAN_TOKEN), max_tokens=5, seed=index, **sampling)
            for index, sampling in enumerate(samplings):
                engine.add(f"broken {index}", [NAN_TOKEN], max_tokens=5, **sampling)
            return engine.run()

    found = run()
    assert taken["whole"] >= 4
    for index in range(len(samplings)):
        assert "no finite logits" in str(found[f"broken {index}"].error)
        others = [found[str(other)] for other in range(index, 16 * len(samplings), len(samplings))]
        assert any(len(answer.token_ids) == 5 for answer in others)
        assert any(1 < len(answer.token_ids) < 5 and answer.error for answer in others), "failed in a decode step"
    monkeypatch.setattr(Model, "decode", lambda *_: None)
    assert_equal(found, run())
