"""Greedy tokens and log-probabilities of the whole engine equal transformers', however the work is cut up."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from harness import LocalEngine, random_prompt
from oracle import MARGIN, oracle

NEW_TOKENS = 64
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 100, 333, 600)
VOCAB = 300
DIFFERENT = ("qwen3", "qwen3_moe", "deepseek_v3", "gpt_oss")
"""Families that differ in their attention or have experts; unit tests compare the passes of each family."""
PARAMS = [pytest.param(family, marks=() if family in DIFFERENT else pytest.mark.grid) for family in FAMILIES]


@pytest.fixture(scope="module", params=PARAMS)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, tokenizer=False)


def prompts(seed: int = 0) -> dict[str, list[int]]:
    return {str(length): random_prompt(seed + length, length, VOCAB) for length in PROMPT_LENGTHS}


def check_greedy(engine: LocalEngine, checkpoint, wanted: dict[str, list[int]]) -> None:
    for name, prompt in wanted.items():
        answer = engine.answers[name]
        assert answer.finish_reason == "length"
        assert len(answer.token_ids) == NEW_TOKENS
        oracle(checkpoint).assert_greedy(prompt, answer.token_ids)


def run(engine: LocalEngine, wanted: dict[str, list[int]], **sampling) -> None:
    for name, prompt in wanted.items():
        engine.add(name, prompt, max_tokens=NEW_TOKENS, **sampling)
    engine.run()


def test_engine_greedy_tokens_equal_transformers(checkpoint):
    engine, prompt = LocalEngine(checkpoint), random_prompt(1, 40, VOCAB)
    engine.add("a", prompt, max_tokens=NEW_TOKENS)
    tokens = engine.run()["a"].token_ids
    expected = oracle(checkpoint).generate(prompt, NEW_TOKENS)
    if tokens != expected:  # allowed only where the two best logits are as good as equal
        first = next(i for i in range(NEW_TOKENS) if tokens[i] != expected[i])
        best, second = oracle(checkpoint).logits(prompt + expected[:first])[-1].topk(2).values.tolist()
        assert best - second <= MARGIN, f"token {first} is {tokens[first]}, not {expected[first]}"


def test_engine_prompts_of_every_length_equal_transformers(checkpoint):
    engine = LocalEngine(checkpoint)
    run(engine, prompts())
    check_greedy(engine, checkpoint, prompts())


def test_engine_chunked_prompts_equal_transformers(checkpoint):
    engine = LocalEngine(checkpoint, max_num_batched_tokens=16)
    run(engine, prompts())
    check_greedy(engine, checkpoint, prompts())


def test_engine_cached_prompts_equal_transformers(checkpoint):
    engine = LocalEngine(checkpoint, block_size=8)
    run(engine, prompts())
    again = {f"{name}-again": prompt for name, prompt in prompts().items()}
    run(engine, again)
    longer = {f"{name}-longer": prompt + engine.answers[name].token_ids[:20] for name, prompt in prompts().items()}
    run(engine, longer)
    check_greedy(engine, checkpoint, prompts() | again | longer)
    assert engine.answers["600-again"].num_cached_tokens == 592
    assert engine.answers["600-longer"].num_cached_tokens >= 600


@pytest.mark.parametrize("caching", [True, False])
def test_engine_repeated_preemption_equals_transformers(checkpoint, caching):
    engine = LocalEngine(checkpoint, block_size=4, max_model_len=100, num_kv_blocks=52, enable_prefix_caching=caching)
    wanted = {str(i): random_prompt(i, 20 + i, VOCAB) for i in range(16)}
    run(engine, wanted)
    check_greedy(engine, checkpoint, wanted)
    assert engine.core.scheduler.stats().num_preemptions > len(wanted)


def test_engine_48_staggered_requests_equal_transformers(checkpoint):
    engine = LocalEngine(checkpoint, max_num_batched_tokens=128, max_num_seqs=16, num_kv_blocks=300, max_model_len=672)
    rng = random.Random(5)
    wanted = {f"r{i}": random_prompt(i, rng.choice((1, 3, 20, 64, 65, 130)), VOCAB) for i in range(48)}
    waiting = list(wanted)
    while waiting:
        for name in [waiting.pop(0) for _ in range(min(len(waiting), rng.randrange(4)))]:
            engine.add(name, wanted[name], max_tokens=NEW_TOKENS)
        engine.step()
    engine.run()
    check_greedy(engine, checkpoint, wanted)


@pytest.mark.parametrize("budget", [512, 16])
def test_engine_logprobs_equal_transformers(checkpoint, budget):
    engine = LocalEngine(checkpoint, max_num_batched_tokens=budget)
    wanted = {name: prompts()[name] for name in ("1", "17", "100")}
    run(engine, wanted, logprobs=5, prompt_logprobs=3, logprob_token_ids=(7, 9))
    for name, prompt in wanted.items():
        answer = engine.answers[name]
        truth = oracle(checkpoint).logprobs(prompt + answer.token_ids)
        for i, entry in enumerate(answer.logprobs):
            row = truth[len(prompt) - 1 + i]
            assert entry.token_ids[0] == answer.token_ids[i]
            assert entry.token_ids[6:] == [7, 9]
            assert torch.allclose(torch.tensor(entry.logprobs), row[entry.token_ids], atol=1e-4)
            top = row.topk(5).values
            assert torch.allclose(torch.tensor(entry.logprobs[1:6]), top, atol=1e-4)
        check_prompt_logprobs(answer.prompt_logprobs, prompt, truth)


def check_prompt_logprobs(pieces, prompt, truth) -> None:
    position = 1
    for piece in pieces:
        assert piece.start == position
        for token_ids, values, rank in zip(piece.token_ids, piece.logprobs, piece.ranks, strict=True):
            row = truth[position - 1]
            assert token_ids[0] == prompt[position]
            assert np.allclose(values, row[torch.from_numpy(token_ids.astype(np.int64))].numpy(), atol=1e-4)
            assert np.allclose(values[1:], row.topk(3).values.numpy(), atol=1e-4)
            assert abs(int((row > row[prompt[position]] + 1e-5).sum()) + 1 - rank) <= 1
            position += 1
    assert position == len(prompt), "every prompt position but the first has its log-probabilities, once"


def test_engine_seeded_samples_are_batch_invariant_and_survive_preemption(checkpoint):
    sampling = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "seed": 1234}
    alone = LocalEngine(checkpoint, max_model_len=672)
    run(alone, {"300": random_prompt(9, 300, VOCAB)}, **sampling)
    expected = alone.answers["300"].token_ids

    batch = LocalEngine(checkpoint, block_size=8, max_model_len=672, num_kv_blocks=90)
    for name, prompt in prompts().items():
        batch.add(name, prompt, max_tokens=NEW_TOKENS, temperature=0.7, seed=len(prompt))
    batch.add("same", random_prompt(9, 300, VOCAB), max_tokens=NEW_TOKENS, **sampling)
    batch.run()
    assert batch.core.scheduler.stats().num_preemptions > 0
    assert batch.answers["same"].token_ids == expected
    assert len(set(expected)) > 5, "it was sampled, not repeated"
