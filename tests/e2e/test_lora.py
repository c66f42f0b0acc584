"""Adapters of running instances: in Python with an engine that is killed, and over HTTP with several servers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import httpx
import msgspec
import pytest
from checkpoints import make_checkpoint
from harness import random_prompt
from peft_adapters import adapted_logits, make_adapter
from processes import children_of
from serving import serve

from eagleray import AsyncEngineArgs, AsyncLLM, LoRARequest, SamplingParams
from eagleray.errors import CheckpointError, InvalidRequest, NotFound

SECONDS = 90.0
MARGIN = 1e-3
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = msgspec.structs.replace(GREEDY, max_tokens=250)
PROMPT = random_prompt(1, 40, 384)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def adapters(checkpoint, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(directory / str(seed), checkpoint, seed=seed, r=4 + 4 * (seed % 2)) for seed in range(3)]


def assert_greedy(checkpoint, adapter, prompt, output):
    """Assert that every token is the likeliest one by PEFT, see `Oracle.assert_greedy`."""
    logits = adapted_logits(checkpoint, adapter, [*prompt, *output])[len(prompt) - 1 : -1]
    behind = [float(row.max() - row[token]) for row, token in zip(logits, output, strict=True)]
    assert max(behind) < MARGIN, behind


def run(work):
    async def limited():
        async with asyncio.timeout(SECONDS):
            return await work

    return asyncio.run(limited())


async def tokens_of(llm, params=GREEDY, prompt=PROMPT, **options) -> list[int]:
    outputs = [output async for output in llm.generate(prompt, params, **options)]
    return outputs[-1].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm(checkpoint):
    args = AsyncEngineArgs(
        str(checkpoint), num_threads=1, max_model_len=400, max_engine_restarts=3, enable_lora=True, max_loras=2
    )
    args.data_parallel_size = 2
    llm = AsyncLLM.from_engine_args(args)
    yield llm
    llm.shutdown()


def test_adapters_of_a_running_instance_are_loaded_replaced_and_survive_an_engine(llm, checkpoint, adapters, tmp_path):
    first, second = (LoRARequest(name, i, str(adapters[i])) for i, name in enumerate(("zero", "one")))

    async def work():
        assert await llm.add_lora(first) is True
        assert await llm.add_lora(first) is False
        # both adapters and none in one batch, on every rank; the second adapter is loaded by its first request
        for rank in (0, 1):
            zero, one, base = await asyncio.gather(
                tokens_of(llm, lora_request=first, data_parallel_rank=rank),
                tokens_of(llm, lora_request=second, data_parallel_rank=rank),
                tokens_of(llm, data_parallel_rank=rank),
            )
            assert_greedy(checkpoint, adapters[0], PROMPT, zero)
            assert_greedy(checkpoint, adapters[1], PROMPT, one)
            assert len({tuple(zero), tuple(one), tuple(base)}) == 3
        assert await llm.list_loras() == {0, 1}

        # mistakes change nothing
        with pytest.raises(InvalidRequest, match="as many as option `max_loras` allows"):
            await llm.add_lora(LoRARequest("two", 2, str(adapters[2])))
        with pytest.raises(InvalidRequest, match="set `load_inplace` to replace it"):
            await llm.add_lora(LoRARequest("zero", 0, str(adapters[2])))
        with pytest.raises(NotFound, match="no such directory"):
            await llm.add_lora(LoRARequest("zero", 0, str(tmp_path / "none"), load_inplace=True))
        damaged = tmp_path / "damaged"
        shutil.copytree(adapters[2], damaged)
        (damaged / "adapter_model.safetensors").write_bytes(b"x" * 100)
        with pytest.raises(CheckpointError, match="not a complete safetensors file"):
            await llm.add_lora(LoRARequest("zero", 0, str(damaged), load_inplace=True))
        assert await tokens_of(llm, lora_request=first) == zero

        # a request that runs keeps the adapter that it began with
        running = llm.generate(PROMPT, LONG, lora_request=first, data_parallel_rank=0)
        await anext(running)
        assert await llm.add_lora(LoRARequest("zero", 0, str(adapters[2]), load_inplace=True)) is True
        replaced = LoRARequest("zero", 0)
        assert_greedy(checkpoint, adapters[2], PROMPT, await tokens_of(llm, lora_request=replaced))
        last = [output async for output in running][-1]
        assert_greedy(checkpoint, adapters[0], PROMPT, last.outputs[0].token_ids)

        # the successor of an engine has the adapters
        engine = next(child for child in children_of(os.getpid()))
        os.kill(engine, signal.SIGKILL)
        for rank in (0, 1):
            assert_greedy(
                checkpoint,
                adapters[2],
                PROMPT,
                await tokens_of(llm, lora_request=replaced, data_parallel_rank=rank),
            )
            assert await tokens_of(llm, lora_request=second, data_parallel_rank=rank) == one

        assert await llm.remove_lora(1) is True
        assert await llm.remove_lora(1) is False
        with pytest.raises(InvalidRequest, match="needs a name and a directory"):
            await tokens_of(llm, lora_request=LoRARequest("one", 1))
        assert await tokens_of(llm) == base

    run(work())


def test_adapters_over_http_reach_every_server_and_engine(checkpoint, adapters):
    options = ("--api-server-count", "2", "--data-parallel-size", "2", "--max-model-len", "400")
    lora = ("--enable-lora", "--lora-modules", f"first={adapters[0]}", "--tensor-parallel-size", "2")
    with serve(str(checkpoint), *options, *lora) as server, httpx.Client(timeout=SECONDS) as http:
        root = server.url.removesuffix("/v1")

        def complete(model: str, rank: int = 0) -> httpx.Response:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
            headers = {"X-data-parallel-rank": str(rank), "Connection": "close"}  # each goes to another API server
            return http.post(f"{root}/v1/completions", json=body, headers=headers)

        def check(model: str, adapter) -> None:
            for i in range(4):
                answer = complete(model, rank=i % 2)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == model
                assert_greedy(checkpoint, adapter, PROMPT, answer.json()["choices"][0]["token_ids"])

        check("first", adapters[0])
        assert complete("second").status_code == 404

        load = {"lora_name": "second", "lora_path": str(adapters[1])}
        answer = http.post(f"{root}/v1/load_lora_adapter", json=load)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' added successfully.")
        check("second", adapters[1])
        cards = {card["id"]: card for card in http.get(f"{root}/v1/models").json()["data"]}
        assert cards["second"]["root"] == str(adapters[1])
        assert cards["second"]["parent"] in cards and cards["second"]["parent"] != "second"

        assert http.post(f"{root}/v1/load_lora_adapter", json=load).status_code == 400
        missing = load | {"lora_name": "third", "lora_path": "/nowhere"}
        assert http.post(f"{root}/v1/load_lora_adapter", json=missing).status_code == 404
        in_place = load | {"lora_path": str(adapters[2]), "load_inplace": True}
        answer = http.post(f"{root}/load_lora_adapter", json=in_place)
        assert answer.json() == {"status": "ok"}
        check("second", adapters[2])

        answer = http.post(f"{root}/v1/unload_lora_adapter", json={"lora_name": "second"})
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'second' removed successfully.")
        assert http.post(f"{root}/v1/unload_lora_adapter", json={"lora_name": "second"}).status_code == 404
        assert all(complete("second").status_code == 404 for _ in range(4))
        check("first", adapters[0])
