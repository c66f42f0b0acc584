"""A draft model changes no token and no log-probability, and proposes what it would generate itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agreement import END, GRAMMARS, THINKING, VOCAB_SIZE, answers, assert_equal
from checkpoints import make_checkpoint
from drafters import RecordingDrafter, record_drafters
from harness import Answer, LocalEngine, random_prompt
from peft_adapters import make_adapter

from eagleray.engine.adapters import EngineAdapters
from eagleray.errors import CheckpointError, ConfigError
from eagleray.messages.adapters import Adapter
from eagleray.messages.steps import SleepWorker, WakeWorker, WorkerSlept, WorkerWoke

LIMITS: dict[str, Any] = {
    "max_num_batched_tokens": 24,
    "max_num_seqs": 5,
    "max_model_len": 120,
    "num_kv_blocks": 16,
    "block_size": 16,
}


@pytest.fixture
def drafters(monkeypatch: pytest.MonkeyPatch) -> list[RecordingDrafter]:
    return record_drafters(monkeypatch)


def config(draft: Path) -> dict[str, Any]:
    return {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 4}


def sampled_answers(checkpoint: Path, **options: Any) -> tuple[dict[str, Answer], LocalEngine]:
    """Run greedy and seeded requests, more than there are rows, pairs of which have the same prompt, and some of which
    have a grammar, in a cache that is too small for all."""
    with LocalEngine(checkpoint, **LIMITS, **options) as engine:
        for index in range(8):
            kwargs: dict[str, Any] = {"temperature": 0.9, "seed": index, "top_k": 20} if index % 2 else {}
            engine.add(str(index), random_prompt(index // 2, 20 + 9 * index, VOCAB_SIZE), max_tokens=30, **kwargs)
            engine.add(f"{index} again", random_prompt(index // 2, 20 + 9 * index, VOCAB_SIZE), max_tokens=30, **kwargs)
        for index, grammar in enumerate(GRAMMARS):
            kwargs = {"grammar": grammar, "eos_token_ids": (END,), "temperature": 1.0 * (index < 2), "seed": index}
            engine.add(grammar.kind, random_prompt(index, 20, VOCAB_SIZE), max_tokens=30, **kwargs)
        engine.add("thinking", random_prompt(9, 20, VOCAB_SIZE), max_tokens=30, **kwargs, thinking=THINKING)
        engine.run()
        stats = engine.core.scheduler.stats()
        assert stats.num_preemptions > 0 and stats.num_prefix_hits > 0
        return engine.answers, engine


def test_draft_model_equal_to_the_model_is_always_right(tmp_path, drafters: list[RecordingDrafter]):
    """The seed of a request draws the same token from the same logits under the same masks, so this holds at any
    temperature and with any grammar."""
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    expected, _ = sampled_answers(checkpoint)
    found, engine = sampled_answers(checkpoint, speculative_config=config(checkpoint))
    assert_equal(found, expected)
    stats = engine.core.scheduler.stats()
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    assert sum(drafters[-1].num_accepted) == stats.num_accepted_tokens


def test_draft_model_proposals_are_what_it_generates_itself(tmp_path, drafters: list[RecordingDrafter]):
    """Whatever of the tokens before was in its cache: prompts in parts, blocks of another request, wrong proposals."""
    model, draft = make_checkpoint(tmp_path / "model", "qwen3"), make_checkpoint(tmp_path / "draft", "llama", seed=1)
    sampled_answers(model, speculative_config=config(draft))
    proposals = drafters[-1].proposals
    assert len(proposals) > 100
    with LocalEngine(draft, **LIMITS | {"num_kv_blocks": 128}) as alone:
        for index, (tokens, proposed) in enumerate(proposals):
            alone.add(str(index), tokens, max_tokens=len(proposed))
        alone.run()
        for index, (_, proposed) in enumerate(proposals):
            assert alone.answers[str(index)].token_ids == proposed


@pytest.mark.parametrize(
    "options",
    [
        {"executor": "in-process"},
        pytest.param({"executor": "processes"}, marks=pytest.mark.grid),
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.grid),
        pytest.param({"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, marks=pytest.mark.grid),
    ],
    ids=str,
)
def test_draft_model_wrong_proposals_answers_are_the_same_bits(
    tmp_path, drafters: list[RecordingDrafter], options: dict[str, Any]
):
    """Requests with grammars, penalties and log-probabilities, of which the draft model guesses some by chance. Stages
    of a pipeline change no bit either."""
    model = make_checkpoint(tmp_path / "model", "qwen3")
    draft = make_checkpoint(tmp_path / "draft", "qwen3", num_hidden_layers=1)
    expected = answers(model, **options | {"pipeline_parallel_size": 1})
    assert_equal(answers(model, speculative_config=config(draft), **options), expected)
    assert drafters[-1].proposals


def test_draft_model_worker_has_slept_proposes_right_tokens_again(tmp_path, drafters: list[RecordingDrafter]):
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    with LocalEngine(checkpoint, **LIMITS, speculative_config=config(checkpoint)) as engine:
        engine.add("a", random_prompt(0, 40, VOCAB_SIZE), max_tokens=60)
        while len(engine.answers["a"].token_ids) < 20:
            engine.step()
        scheduler = engine.core.scheduler
        scheduler.preempt_all()
        assert scheduler.reset_prefix_cache()
        seconds = engine.core.call_seconds
        engine.executor.call(SleepWorker(tags=("weights", "kv_cache"), level=1), WorkerSlept, timeout=seconds)
        engine.executor.call(WakeWorker(tags=("weights", "kv_cache")), WorkerWoke, timeout=seconds)
        num_before = scheduler.stats().num_accepted_tokens
        engine.run()
        stats = scheduler.stats()
        assert stats.num_accepted_tokens == stats.num_draft_tokens > num_before


def test_draft_model_quantized_when_it_is_loaded_changes_no_bit(tmp_path, drafters: list[RecordingDrafter]):
    checkpoint = make_checkpoint(tmp_path, "qwen3")
    expected, _ = sampled_answers(checkpoint, dtype="bfloat16")
    options = config(checkpoint) | {"quantization": "int8"}
    found, engine = sampled_answers(checkpoint, dtype="bfloat16", speculative_config=options)
    assert_equal(found, expected)
    stats = engine.core.scheduler.stats()
    assert stats.num_draft_tokens / 2 < stats.num_accepted_tokens < stats.num_draft_tokens
    with pytest.raises(ConfigError, match=r"draft model .* \(`speculative_config`\): option `quantization`: gptq is a"):
        LocalEngine(checkpoint, dtype="bfloat16", speculative_config=options | {"quantization": "gptq"})


def adapted_answers(checkpoint: Path, adapter: Path, **options: Any) -> tuple[dict[str, Answer], LocalEngine]:
    """Run requests with an adapter and without one together, which have the same prompts."""
    with LocalEngine(checkpoint, **LIMITS, enable_lora=True, max_loras=1, **options) as engine:
        load = EngineAdapters(engine.core).load(Adapter(name="a", number=1, path=str(adapter)), timeout=60.0)
        with pytest.raises(StopIteration):
            next(load)
        for index in range(4):
            kwargs: dict[str, Any] = {"temperature": 0.8, "seed": index, "logprobs": 2, "max_tokens": 25}
            prompt = random_prompt(index, 30, VOCAB_SIZE)
            engine.add(f"{index}", prompt, **kwargs)
            engine.add(f"{index} adapted", prompt, **kwargs, adapter="a")
        engine.run()
        return engine.answers, engine


def test_draft_model_proposes_for_requests_with_adapters(tmp_path, drafters: list[RecordingDrafter]):
    """The draft model has no adapters, so it is right about some of their tokens only."""
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    adapter = make_adapter(tmp_path / "adapter", checkpoint, seed=0, r=4)
    expected, _ = adapted_answers(checkpoint, adapter)
    assert expected["0"].token_ids != expected["0 adapted"].token_ids
    found, engine = adapted_answers(checkpoint, adapter, speculative_config=config(checkpoint))
    assert_equal(found, expected)
    stats = engine.core.scheduler.stats()
    assert 50 < stats.num_accepted_tokens < stats.num_draft_tokens


def test_draft_model_of_another_vocabulary_is_refused(tmp_path):
    model, draft = make_checkpoint(tmp_path / "model", "qwen3"), tmp_path / "draft"
    make_checkpoint(draft, "qwen3", vocab_size=512)
    with pytest.raises(ConfigError, match=r"`vocab_size` is 512 in .*draft/config.json and 384 in .*model/config.json"):
        LocalEngine(model, speculative_config=config(draft))
    make_checkpoint(draft, "qwen3")
    tokenizer = draft / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace("<|im_end|>", "<|turn_end|>"))
    with pytest.raises(ConfigError, match=r"but .*draft/tokenizer.json and .*model/tokenizer.json have different ones"):
        LocalEngine(model, speculative_config=config(draft))
    with pytest.raises(CheckpointError, match="there is no such directory, and it is no model id"):
        LocalEngine(model, speculative_config=config(tmp_path / "none"))
