"""Drafts change no token and no log-probability, by one bit, whatever is drafted and whatever computes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agreement import VOCAB_SIZE, answers
from checkpoints import make_checkpoint
from drafters import RecordedDrafter
from harness import Answer

from eagleray.engine import startup

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


def assert_equal(found: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].token_ids == answer.token_ids, name
        assert found[name].logprobs == answer.logprobs, name
        assert found[name].finish_reason == answer.finish_reason
        assert found[name].error == answer.error
        positions = zip(scores(found[name]), scores(answer), strict=True)
        assert all(np.array_equal(one, other) for one, other in positions)


def scores(answer: Answer) -> list[np.ndarray]:
    """Return the log-probabilities of each position of the prompt, which come in chunks of any size."""
    return [position for part in answer.prompt_logprobs for position in part.logprobs]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"executor": "in-process"}),
        ("gpt_oss", {"executor": "in-process"}),
        ("deepseek_v3", {"executor": "in-process"}),
        ("qwen3_moe", {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
        pytest.param("qwen3", {"tensor_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param("qwen3", {"pipeline_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param("qwen2", {"executor": "processes"}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_drafts_right_and_wrong_answers_are_the_same_bits(tmp_path, monkeypatch, family: str, options: dict[str, Any]):
    checkpoint = make_checkpoint(tmp_path, family)
    expected = answers(checkpoint, **options)
    drafters = []

    def make_drafter(_: object) -> RecordedDrafter:
        outputs = {name: answer.token_ids for name, answer in expected.items()}
        drafters.append(RecordedDrafter(outputs, vocab_size=VOCAB_SIZE))
        return drafters[-1]

    monkeypatch.setattr(startup, "Drafter", make_drafter)
    assert_equal(answers(checkpoint, speculative_config=SPECULATION, **options), expected)
    assert sum(drafters[-1].num_accepted[1:]) > 0
