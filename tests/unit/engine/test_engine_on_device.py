"""A whole engine on a GPU: its tokens, the waits and allocations of its steps, and what it leaves behind.

The same runs on a CPU, shortly, to show that the tests themselves are right.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from harness import LocalEngine, random_prompt
from oracle import Oracle

ON_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SETTLED_STEPS = 20
"""Steps after which pools of memory have their size."""


def on_gpu(*values: object) -> object:
    return pytest.param(*values, marks=ON_GPU)


def open_engine(checkpoint: Path, device: str, **options: object) -> LocalEngine:
    defaults = {"num_kv_blocks": 200, "max_num_seqs": 8, "max_num_batched_tokens": 48}
    if device == "cuda":  # else a kernel that does not compile would be replaced by plain torch
        defaults["attention_backend"] = "triton"
    return LocalEngine(checkpoint, device=device, executor="in-process", **{**defaults, **options})


@contextmanager
def no_waits(device: str) -> Iterator[None]:
    """Have torch raise where the host waits for a GPU, but for the wait for an event."""
    if device == "cpu":
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def device_memory(device: str) -> tuple[int, int]:
    """Return the bytes that torch has allocated and reserved."""
    if device == "cpu":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def run_steps(engine: LocalEngine, count: int) -> None:
    for _ in range(count):
        engine.core.step(lambda chunks: None)


@pytest.mark.parametrize(("device", "family"), [("cpu", "qwen3_moe"), *(on_gpu("cuda", family) for family in FAMILIES)])
def test_engine_greedy_float32_tokens_equal_transformers(device: str, family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    oracle = Oracle(checkpoint)
    prompts = {str(length): random_prompt(length, length, 384) for length in (1, 7, 40, 61, 130)}
    with open_engine(checkpoint, device, dtype="float32") as engine:
        for name, prompt in prompts.items():
            engine.add(name, prompt, max_tokens=24)
        answers = engine.run()
    for name, prompt in prompts.items():
        assert len(answers[name].token_ids) == 24
        oracle.assert_greedy(prompt, answers[name].token_ids)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "float32"), on_gpu("cuda", "bfloat16")])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_decode_steps_neither_wait_nor_keep_memory(device: str, dtype: str, family: str, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)
    num_steps = 950 if device == "cuda" else 30
    with open_engine(checkpoint, device, dtype=dtype, num_kv_blocks=300) as engine:
        sampled = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "frequency_penalty": 0.3}
        engine.add("greedy", random_prompt(0, 20, 384), max_tokens=1000)
        engine.add("sampled", random_prompt(1, 9, 384), max_tokens=1000, **sampled)
        engine.add("scored", random_prompt(2, 5, 384), max_tokens=1000, logprobs=3)
        run_steps(engine, SETTLED_STEPS)
        before = device_memory(device)
        with no_waits(device):
            run_steps(engine, num_steps)
        assert device_memory(device) == before
        assert engine.core.scheduler.stats().num_running == 3


@pytest.mark.timeout(170)
@pytest.mark.parametrize(("device", "count"), [("cpu", 3), on_gpu("cuda", 100)])
def test_engine_started_and_closed_leaves_nothing(device: str, count: int, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False, num_hidden_layers=1)

    def live() -> None:
        with open_engine(checkpoint, device, max_num_seqs=4, max_num_batched_tokens=16) as engine:
            engine.add("one", random_prompt(0, 20, 384), max_tokens=3)
            assert len(engine.run()["one"].token_ids) == 3
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()

    def held() -> tuple[object, ...]:
        return *device_memory(device), threading.active_count(), len(os.listdir("/proc/self/fd"))

    live()
    live()  # the first ones open what a process keeps, such as the libraries of the device
    before = held()
    for _ in range(count):
        live()
    assert held() == before
