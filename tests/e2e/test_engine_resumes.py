"""A request that one engine begins and another finishes gets the output of a single engine: the same tokens, and
log-probabilities equal to the last bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from harness import Answer, LocalEngine, random_prompt

from eagleray.messages.thinking import Thinking

VOCAB = 300
NEW_TOKENS = 24
SEEDED = {"temperature": 1.0, "top_p": 0.95, "top_k": 40, "min_p": 0.01, "seed": 1234}

Requests = dict[str, dict[str, Any]]

REQUESTS: Requests = {
    "greedy": {"prompt": random_prompt(0, 5, VOCAB)},
    "seeded": SEEDED | {"prompt": random_prompt(1, 40, VOCAB)},
    "penalties": SEEDED
    | {"prompt": random_prompt(2, 17, VOCAB), "presence_penalty": 0.7, "frequency_penalty": 0.9}
    | {"repetition_penalty": 1.3},
    "greedy penalties": {"prompt": random_prompt(3, 64, VOCAB), "presence_penalty": 1.5, "repetition_penalty": 1.5},
    "logprobs": {"prompt": random_prompt(4, 33, VOCAB), "logprobs": 3, "logprob_token_ids": (7, 9)},
    "prompt logprobs": SEEDED | {"prompt": random_prompt(5, 100, VOCAB), "prompt_logprobs": 2, "logprobs": 0},
    "bias": SEEDED
    | {"prompt": random_prompt(6, 16, VOCAB), "logit_bias": {5: 4.0, 6: -100.0}}
    | {"allowed_token_ids": tuple(range(3, 40))},
    "thinking": SEEDED
    | {"prompt": random_prompt(7, 20, VOCAB)}
    | {"thinking": Thinking(end=(9,), is_open=True, budget=8, forced_end=(8, 9))},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3_moe"])
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(request.param), request.param, tokenizer=False)


@pytest.fixture(scope="module")
def undisturbed(checkpoint) -> dict[str, Answer]:
    return begin(checkpoint, REQUESTS).run()


def begin(checkpoint, requests: Requests, **options: Any) -> LocalEngine:
    engine = LocalEngine(checkpoint, **{"max_model_len": 256, "num_kv_blocks": 200, **options})
    for name, kwargs in requests.items():
        engine.add(name, **{"max_tokens": NEW_TOKENS, **kwargs})
    return engine


def interrupted(checkpoint, requests: Requests, num_steps: int, **options: Any) -> dict[str, Answer]:
    """Return the answers of requests that move to a new engine after `num_steps` steps."""
    first = begin(checkpoint, requests, **options)
    for _ in range(num_steps):
        first.step()
    left = {name: answer for name, answer in first.answers.items() if answer.finish_reason is None}
    second = begin(checkpoint, {name: requests[name] | progress_of(answer) for name, answer in left.items()}, **options)
    second.run()
    return {name: joined(answer, second.answers[name]) for name, answer in left.items()}


def progress_of(answer: Answer) -> dict[str, Any]:
    num_prompt_logprobs = sum(len(piece.ranks) for piece in answer.prompt_logprobs)
    return {"output_token_ids": answer.token_ids, "prompt_logprobs_from": 1 + num_prompt_logprobs}


def joined(begun: Answer, ended: Answer) -> Answer:
    return Answer(
        token_ids=begun.token_ids + ended.token_ids,
        logprobs=begun.logprobs + ended.logprobs,
        prompt_logprobs=begun.prompt_logprobs + ended.prompt_logprobs,
        finish_reason=ended.finish_reason,
        stop_token_id=ended.stop_token_id,
    )


def check_equal(answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    for name, answer in answers.items():
        one = expected[name]
        assert answer.token_ids == one.token_ids, name
        assert (answer.finish_reason, answer.stop_token_id) == (one.finish_reason, one.stop_token_id)
        assert answer.logprobs == one.logprobs
        for field in ("token_ids", "logprobs", "ranks"):
            assert np.array_equal(prompt_logprobs(answer, field), prompt_logprobs(one, field))


def prompt_logprobs(answer: Answer, field: str) -> np.ndarray:
    return np.concatenate([np.empty(0), *(getattr(piece, field).ravel() for piece in answer.prompt_logprobs)])


@pytest.mark.parametrize("num_steps", [1, 2, 9, 22])
def test_resumed_requests_equal_uninterrupted_ones(checkpoint, undisturbed, num_steps):
    answers = interrupted(checkpoint, REQUESTS, num_steps)
    assert answers.keys() == REQUESTS.keys()
    check_equal(answers, undisturbed)


@pytest.mark.parametrize("num_steps", [3, 11, 30])
def test_resumed_requests_with_small_chunks_and_full_cache_are_equal(checkpoint, undisturbed, num_steps):
    """The first engine stops within prompts, and so within their log-probabilities."""
    options = {"max_num_batched_tokens": 16, "num_kv_blocks": 17}
    answers = interrupted(checkpoint, REQUESTS, num_steps, **options)
    assert answers
    check_equal(answers, undisturbed)


def test_resumed_requests_stop_after_tokens_of_both_engines(checkpoint, undisturbed):
    seeded, token_ids = REQUESTS["seeded"], undisturbed["seeded"].token_ids
    end = token_ids[10]
    place = token_ids.index(end)
    requests = {
        "stop": seeded | {"stop_token_ids": (end,)},
        "min": seeded | {"stop_token_ids": tuple(range(384)), "min_tokens": 13},
        "max": seeded | {"max_tokens": 7},
        "eos": seeded | {"eos_token_ids": (end,), "suppressed_token_ids": (end,), "min_tokens": place + 3},
        "bad words": seeded | {"bad_words": ((token_ids[2], token_ids[3]), (token_ids[6],))},
    }
    expected = begin(checkpoint, requests).run()
    assert (expected["stop"].finish_reason, expected["stop"].stop_token_id) == ("stop", end)
    assert len(expected["stop"].token_ids) == place + 1
    assert len(expected["min"].token_ids) == 13
    assert (expected["max"].finish_reason, len(expected["max"].token_ids)) == ("length", 7)
    assert len(expected["eos"].token_ids) >= place + 3
    assert expected["bad words"].token_ids[:4] != token_ids[:4]
    for num_steps in (1, 3, 5, 7, 12):
        check_equal(interrupted(checkpoint, requests, num_steps), expected)


def test_resumed_request_reports_cached_tokens(checkpoint):
    engine = LocalEngine(checkpoint, block_size=8, max_model_len=256, num_kv_blocks=200)
    prompt = random_prompt(3, 50, VOCAB)
    engine.add("a", prompt, max_tokens=20)
    token_ids = engine.run()["a"].token_ids
    engine.add("b", prompt, max_tokens=20, output_token_ids=token_ids[:12])
    engine.run()
    assert engine.answers["b"].token_ids == token_ids[12:]
    assert engine.answers["b"].num_cached_tokens == 50
    assert engine.core.scheduler.stats().num_generation_tokens == 28
