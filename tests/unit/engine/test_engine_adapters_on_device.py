"""An engine with adapters on a GPU has the tokens that PEFT computes, also when adapters were replaced and when it has
slept. The same run on a CPU shows that the test itself is right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from harness import LocalEngine, random_prompt

from eagleray.engine.adapters import EngineAdapters
from eagleray.messages.adapters import Adapter
from eagleray.messages.steps import SleepWorker, WakeWorker, WorkerSlept, WorkerWoke

pytest.importorskip("peft")  # which may be missing where there is a GPU
from peft_adapters import adapted_logits, make_adapter

TAGS = ("weights", "kv_cache")
MARGIN = 1e-3
SECONDS = 60.0
ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def assert_greedy(checkpoint: Path, adapter: Path, prompt: list[int], output: list[int]) -> None:
    """Assert that every token is the likeliest one by PEFT, but for rounding."""
    logits = adapted_logits(checkpoint, adapter, [*prompt, *output])[len(prompt) - 1 : -1]
    assert output
    for row, token in zip(logits, output, strict=True):
        assert row.max() - row[token] < MARGIN


@pytest.mark.parametrize(
    ("device", "options"),
    [
        ("cpu", {}),
        pytest.param("cuda", {"attention_backend": "triton"}, marks=ON_GPU),
        pytest.param("cuda", {"attention_backend": "torch"}, marks=ON_GPU),
    ],
)
def test_engine_with_adapters_tokens_equal_peft(device: str, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3", tokenizer=False)
    paths = [make_adapter(tmp_path / str(seed), checkpoint, seed=seed, r=4 + seed) for seed in range(3)]
    prompts = {str(length): random_prompt(length, length, 384) for length in (1, 7, 33, 60, 61)}
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "dtype": "float32", **options}
    with LocalEngine(
        checkpoint,
        device=device,
        executor="in-process",
        num_kv_blocks=200,
        enable_prefix_caching=False,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=6,
        **options,
    ) as engine:
        adapters = EngineAdapters(engine.core)

        def load(number: int, name: str, path: Path) -> None:
            waits = adapters.load(Adapter(name=name, number=number, path=str(path)), SECONDS)
            with pytest.raises(StopIteration) as outcome:
                next(waits)
            assert "digest" in outcome.value.value

        def check(prefix: str, names: dict[str, Path | None]) -> dict[str, list[int]]:
            """Compute each prompt with another adapter or with none, all in the same steps."""
            chosen = dict(zip(prompts, [*names, *names, *names], strict=False))
            for key, prompt in prompts.items():
                engine.add(prefix + key, prompt, max_tokens=8, adapter=chosen[key])
            answers = {key: engine.run()[prefix + key].token_ids for key in prompts}
            for key, tokens in answers.items():
                path = names[chosen[key]]
                if path is not None:
                    assert_greedy(checkpoint, path, prompts[key], tokens)
            return answers

        load(1, "a", paths[0])
        load(2, "b", paths[1])
        first = check("first", {"a": paths[0], "": None, "b": paths[1]})
        adapters.drop(1)
        load(3, "a", paths[2])
        second = check("second", {"a": paths[2], "": None, "b": paths[1]})
        assert first != second
        engine.executor.call(SleepWorker(tags=TAGS, level=1), WorkerSlept, timeout=SECONDS)
        engine.executor.call(WakeWorker(TAGS), WorkerWoke, timeout=SECONDS)
        assert check("third", {"a": paths[2], "": None, "b": paths[1]}) == second
