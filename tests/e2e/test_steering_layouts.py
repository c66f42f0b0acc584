"""Pauses, sleep and an update with requests in flight, for every way to divide a model among processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from checkpoints import make_checkpoint

from eagleray import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams

pytestmark = pytest.mark.grid

SECONDS = 120.0
NUM_REQUESTS = 64
NUM_TOKENS = 250
GREEDY = SamplingParams(
    temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
)
LAYOUTS = {
    "workers": ("qwen3", {"executor": "processes", "data_parallel_size": 2}),
    "tp": ("qwen3", {"tensor_parallel_size": 2}),
    "pp": ("qwen3", {"pipeline_parallel_size": 2}),
    "ep": ("qwen3_moe", {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "ep-tp": ("qwen3_moe", {"data_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
}

Disturb = Callable[[AsyncLLM], Awaitable[object]]


def checkpoints(directory: Any, family: str) -> list[str]:
    """Make two checkpoints with equal shapes and different weights."""
    return [str(make_checkpoint(directory / str(seed), family, seed=seed)) for seed in range(2)]


def start(checkpoint: str, layout: dict[str, Any]) -> AsyncLLM:
    args = AsyncEngineArgs(model=checkpoint, max_model_len=512, num_kv_blocks=3000, num_threads=1, **layout)
    return AsyncLLM.from_engine_args(args)


async def generate(llm: AsyncLLM, disturb: Disturb | None = None) -> list[Any]:
    """Return the completions of all requests. `disturb` is awaited when all have tokens."""

    async def one(index: int) -> Any:
        (final,) = [output async for output in llm.generate({"prompt_token_ids": [1 + index, 5, 6]}, GREEDY)]
        return final.outputs[0]

    requests = [asyncio.create_task(one(index)) for index in range(NUM_REQUESTS)]
    if disturb is not None:
        streams = llm._streams
        while len(streams) < NUM_REQUESTS or not all(stream.num_tokens for stream in streams.values()):
            await asyncio.sleep(0.005)
        await disturb(llm)
    return await asyncio.gather(*requests)


async def pause(llm: AsyncLLM) -> None:
    answer = await llm.pause_generation(mode="keep")
    assert answer["num_kept"] > 0
    await llm.resume_generation()


async def sleep(llm: AsyncLLM) -> None:
    answer = await llm.sleep(level=1, mode="keep")
    assert answer["freed_bytes"] > 0
    assert await llm.wake_up()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_steering_requests_in_flight_every_layout(layout, tmp_path):
    family, options = LAYOUTS[layout]
    old, new = checkpoints(tmp_path, family)

    async def update(llm: AsyncLLM) -> None:
        await llm.update_weights({"weight_dir": new, "weight_version": "new"})

    async def work(llm: AsyncLLM) -> None:
        undisturbed = [output.token_ids for output in await generate(llm)]
        assert [output.token_ids for output in await generate(llm, pause)] == undisturbed
        assert [output.token_ids for output in await generate(llm, sleep)] == undisturbed
        updated = await generate(llm, update)
        assert any(len(output.weight_versions) == 2 for output in updated)
        for output, tokens in zip(updated, undisturbed, strict=True):
            first = output.weight_versions[0]
            assert first.version == "default" and output.token_ids[: first.end] == tokens[: first.end]
            assert output.weight_versions[-1].end == NUM_TOKENS
        assert [output.token_ids for output in await generate(llm)] == of_new

    of_new = [output.token_ids for output in run(start(new, options), generate)]
    run(start(old, options), work)


def run(llm: AsyncLLM, work: Callable[[AsyncLLM], Awaitable[Any]]) -> Any:
    async def limited() -> Any:
        async with asyncio.timeout(SECONDS):
            return await work(llm)

    try:
        return asyncio.run(limited())
    finally:
        llm.shutdown()
