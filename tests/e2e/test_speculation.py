"""Drafts change no token and no log-probability, by one bit, whatever is drafted and whatever computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agreement import VOCAB_SIZE, answers, assert_equal
from checkpoints import make_checkpoint
from drafters import RecordedDrafter
from harness import Answer, LocalEngine

from eagleray.engine import startup
from eagleray.messages.grammars import Grammar
from eagleray.scheduler.step_costs import StepCosts

SPECULATION = {"method": "ngram", "num_speculative_tokens": 4}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", {"executor": "in-process"}),
        ("gpt_oss", {"executor": "in-process"}),
        ("gpt_oss", {"executor": "in-process", "kv_cache_dtype": "int8"}),
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

    monkeypatch.setattr(startup, "make_drafter", make_drafter)
    assert_equal(answers(checkpoint, speculative_config=SPECULATION, **options), expected)
    assert sum(drafters[-1].num_accepted[1:]) > 0


METHODS = (
    {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    {"method": "suffix", "num_speculative_tokens": 4},
)
PERIOD = [7, 8, 9, 10, 11]
DIGITS = Grammar(kind="regex", source="(12345 ){9}")


def repetitive_answers(checkpoint: Path, **options: Any) -> tuple[dict[str, Answer], LocalEngine]:
    """Run requests whose outputs repeat their prompts and each other: samples of a prompt, and tokens that a bias, a
    penalty or a grammar leads to, in a cache that is too small for all."""
    limits = {"max_num_seqs": 5, "max_model_len": 160, "num_kv_blocks": 12, "block_size": 16}
    with LocalEngine(checkpoint, **limits, **options) as engine:
        engine.add("grammar", [5], max_tokens=1, grammar=DIGITS)
        engine.run()
        biases: dict[str, Any] = {"logit_bias": dict.fromkeys(PERIOD, 9.0), "logprobs": 2}
        for index in range(6):
            kwargs = biases | {"temperature": 0.5, "seed": index // 2}
            engine.add(f"group/{index}", PERIOD * 5, max_tokens=30, **kwargs)
        engine.add("penalty", PERIOD * 6, max_tokens=30, frequency_penalty=0.3, **biases)
        for index in range(2):
            engine.add(f"grammar/{index}", [5, 6, 7], max_tokens=40, grammar=DIGITS, logprobs=1)
        engine.run()
        return engine.answers, engine


@pytest.mark.parametrize("speculation", METHODS, ids=lambda options: options["method"])
def test_methods_that_draft_answers_are_the_same_bits(tmp_path, monkeypatch, speculation: dict[str, Any]):
    """Drafts cost nothing here, so that there are many."""
    monkeypatch.setattr(StepCosts, "seconds", lambda self, num_tokens: 1.0)
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    expected, _ = repetitive_answers(checkpoint, executor="in-process")
    found, engine = repetitive_answers(checkpoint, executor="in-process", speculative_config=speculation)
    assert_equal(found, expected)
    stats = engine.core.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.num_accepted_tokens > 30 and stats.num_draft_tokens > stats.num_accepted_tokens
