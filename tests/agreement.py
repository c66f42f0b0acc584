"""Agreement of executors: the same requests, through any number of workers, give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import SPECIAL_TOKENS
from harness import Answer, LocalEngine, random_prompt

from eagleray.messages.grammars import Grammar
from eagleray.messages.structured_outputs import DEFAULT_WHITESPACE
from eagleray.messages.thinking import Thinking

VOCAB_SIZE = 384
LENGTHS = (1, 7, 33, 60, 21, 90)
PROPERTIES = '{"a": {"type": "integer"}, "b": {"enum": ["x", "yes"]}}'
SCHEMA = f'{{"type": "object", "properties": {PROPERTIES}, "required": ["a", "b"], "additionalProperties": false}}'
GRAMMARS = (
    Grammar(kind="regex", source="[a-z]{2,5}(-[0-9]{3}){6,}"),
    Grammar(kind="json_schema", source=SCHEMA, whitespace=DEFAULT_WHITESPACE),
    Grammar(kind="choice", source='["yes", "no", "perhaps"]'),
)
END = SPECIAL_TOKENS.index("<|im_end|>")
THINKING = Thinking(end=(9,), is_open=True, budget=5, forced_end=(8, 9), forbidden=(END,))
OPTIONS: dict[str, Any] = {
    "max_num_batched_tokens": 48,
    "max_num_seqs": 5,
    "max_model_len": 160,
    "num_kv_blocks": 10,
    "block_size": 16,
}


def answers(checkpoint: Path, **options: Any) -> dict[str, Answer]:
    """Run greedy and seeded requests with log-probabilities, more than there are rows, with prompts longer than a
    step, in a cache that is too small for all. Each grammar has a greedy completion, and a drawn one whose prompt is
    cached in part; one has thinking before it."""
    with LocalEngine(checkpoint, **OPTIONS, **options) as engine:
        for grammar in GRAMMARS:
            engine.add(f"first {grammar.kind}", [5, 6, 7], max_tokens=1, grammar=grammar)
        engine.run()  # all grammars are compiled, so that the time of compilations does not decide what is preempted
        for index, grammar in enumerate(GRAMMARS):
            prompt = random_prompt(100 + index, 45, VOCAB_SIZE)
            kwargs = {"grammar": grammar, "eos_token_ids": (END,), "max_tokens": 20, "logprobs": 2}
            engine.add(f"greedy {grammar.kind}", prompt, **kwargs)
            engine.add(f"drawn {grammar.kind}", prompt, **kwargs, temperature=1.0, seed=index)
        engine.add("thinking", prompt, **kwargs, temperature=1.0, seed=7, thinking=THINKING)
        for index, length in enumerate(LENGTHS):
            kwargs: dict[str, Any] = {"logprobs": 3}
            if index % 3 == 1:
                kwargs |= {"temperature": 0.8, "seed": index, "presence_penalty": 0.5}
            if index % 3 == 2:
                kwargs |= {"prompt_logprobs": 2}
            engine.add(str(index), random_prompt(index, length, VOCAB_SIZE), max_tokens=12 + index, **kwargs)
        engine.run()
        assert engine.answers["thinking"].token_ids[5:7] == [8, 9]
        assert engine.core.scheduler.stats().num_preemptions > 0, "the cache is too large for this test"
        return engine.answers


def assert_agree(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Check equal tokens, and log-probabilities within 1e-4 (sums over ranks are added in another order)."""
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].error is None
        assert found[name].token_ids == answer.token_ids, f"request {name}"
        assert found[name].finish_reason == answer.finish_reason
        for one, other in zip(found[name].logprobs, answer.logprobs, strict=True):
            assert one.rank == other.rank
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4, rtol=0)
        np.testing.assert_allclose(_prompt(found[name]), _prompt(answer), atol=1e-4, rtol=0)


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Check equal tokens and log-probabilities, bit for bit."""
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].logprobs == answer.logprobs, name
        assert found[name].finish_reason == answer.finish_reason
        assert found[name].error == answer.error
        positions = zip(_scores(found[name]), _scores(answer), strict=True)
        assert all(np.array_equal(one, other) for one, other in positions)


def _scores(answer: Answer) -> list[np.ndarray]:
    """Return the log-probabilities of each position of the prompt, which come in chunks of any size."""
    return [position for part in answer.prompt_logprobs for position in part.logprobs]


def _prompt(answer: Answer) -> np.ndarray:
    return np.concatenate([part.logprobs for part in answer.prompt_logprobs] or [np.empty((0, 3))])
