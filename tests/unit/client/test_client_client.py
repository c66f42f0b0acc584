"""The client, with the test in the role of its engines."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest
from client_fakes import CLIENT, INFO, FakeEngine, Setup, asynchronous, attached, start_task
from client_tokenizers import write_checkpoint

from eagleray.client.client import Client
from eagleray.client.flat_logprobs import FlatLogprobs
from eagleray.client.preprocess import Prompt
from eagleray.config.build import build_config
from eagleray.errors import (
    ChannelClosed,
    CheckpointError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    RequestFailed,
    Unavailable,
)
from eagleray.identity import ClientId, EngineId
from eagleray.messages.checkpoints import CheckpointFetched, FetchCheckpoint
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Attach, ClientStarted, Knows, Stop
from eagleray.messages.membership import Joined, Left
from eagleray.messages.outputs import EngineStats, ExpertLoad, FinishReason, PromptLogprobs, TokenLogprobs
from eagleray.messages.sampling import SamplingParams

PROMPT = Prompt(token_ids=[5, 6, 7])
PARAMS = SamplingParams(temperature=0)
LENGTH = FinishReason.LENGTH


def report(engine, num_running=0):
    counts = dict.fromkeys(
        [
            *("num_waiting", "num_kv_blocks", "num_free_kv_blocks", "num_steps", "num_preemptions"),
            *("num_prompt_tokens", "num_generation_tokens", "num_prefix_queries", "num_prefix_hits"),
        ],
        0,
    )
    return EngineStats(engine=engine.id, num_running=num_running, **counts)


# The client in the fleet.


@asynchronous
async def test_attach_sends_knows_and_client_started():
    async with attached() as setup:
        assert setup.network.mail["supervisor"] == [Knows(CLIENT, setup.engine.id), ClientStarted(CLIENT)]
        assert setup.client.address == "client"
        assert setup.client.engine_info == INFO
        assert await setup.client.wait_until_ready(5) == INFO


@asynchronous
async def test_wait_until_ready_returns_when_engine_joins():
    setup = Setup()
    await setup.deliver(Attach(CLIENT, "supervisor", []))
    assert setup.client.engine_info is None
    with pytest.raises(DeadlineExceeded, match="no engine was ready"):
        await setup.client.wait_until_ready(0.01)
    waiting = await start_task(setup.client.wait_until_ready(5))
    await setup.deliver(Joined(ClientId("test", 1), "other client"))
    assert not waiting.done()
    await setup.deliver(setup.engine.joined_message())
    assert await waiting == INFO
    await setup.client.close()


@asynchronous
async def test_wait_until_ready_failed_start_raises_its_cause():
    setup = Setup()
    waiting = await start_task(setup.client.wait_until_ready(5))
    await setup.deliver(Left(setup.engine.id, "no memory", returns=False))
    with pytest.raises(EngineFailed, match="engine-0 ended: no memory"):
        await waiting
    with pytest.raises(Unavailable, match="no engine is ready: engine-0 ended: no memory"):
        setup.client.generate(PROMPT, PARAMS)
    successor = FakeEngine(setup)
    successor.id = EngineId("test", 0, incarnation=1)
    await setup.deliver(successor.joined_message())
    assert await setup.client.wait_until_ready(5) == INFO
    await setup.client.close()


@asynchronous
async def test_stats_are_latest_of_joined_engines():
    async with attached() as setup:
        assert setup.client.stats == {}
        await setup.deliver(report(setup.engine, 1), report(setup.engine, 2))
        assert setup.client.stats == {setup.engine.id: report(setup.engine, 2)}
        await setup.engine.leave()
        await setup.deliver(report(setup.engine, 3))
        assert setup.client.stats == {}


@asynchronous
async def test_expert_load_is_latest_of_joined_engines():
    def load(engine, count):
        return ExpertLoad(engine=engine.id, counts=np.full((1, 300), count))

    async with attached() as setup:
        assert setup.client.expert_load == {}
        await setup.deliver(load(setup.engine, 1), load(setup.engine, 2))
        (found,) = setup.client.expert_load.values()
        assert (found.engine, found.counts.max()) == (setup.engine.id, 2)
        early = FakeEngine(setup, incarnation=1)
        await setup.deliver(load(early, 7))
        assert list(setup.client.expert_load) == [setup.engine.id]
        await setup.engine.leave()
        assert setup.client.expert_load == {}
        await early.join()
        assert [found.counts.max() for found in setup.client.expert_load.values()] == [7]


@asynchronous
async def test_generate_two_engines_balances_requests():
    async with attached() as setup:
        other = FakeEngine(setup, rank=1)
        await setup.deliver(other.joined_message())
        streams = [setup.client.generate(PROMPT, PARAMS) for _ in range(4)]
        assert [len(engine.receive().request_ids) for engine in (setup.engine, other)] == [2, 2]
        assert setup.client.engines == {setup.engine.id: INFO, other.id: INFO}
        for stream in streams:
            stream.abort()


@asynchronous
async def test_generate_finished_requests_are_no_load():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        streams = [setup.client.generate(PROMPT, SamplingParams(n=2)) for _ in range(4)]
        setup.engine.receive()
        await setup.engine.send(*((number, {"token_ids": [9], "finish_reason": LENGTH}) for number in range(4)))
        assert setup.client.num_in_flight == 2
        for _ in range(4):
            setup.client.generate(PROMPT, PARAMS)
        assert (len(setup.engine.receive().request_ids), len(other.receive().request_ids)) == (4 + 4, 4)
        for stream in streams:
            stream.abort()
        setup.client.generate(PROMPT, PARAMS)
        assert len(other.receive().request_ids) == 4 + 1


@asynchronous
async def test_stop_refuses_new_requests_and_finishes_running_ones():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        await setup.deliver(Stop(12.5))
        assert setup.client.stopping.is_set()
        assert setup.client.grace == 12.5
        with pytest.raises(Unavailable, match="stopping"):
            setup.client.generate(PROMPT, PARAMS)
        await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await stream.result()).finished


@asynchronous
async def test_close_aborts_requests_and_ends_run():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        await setup.client.close()
        await setup.client.close()
        await setup.running
        assert (await stream.result()).outputs[0].finish_reason == "abort"
        assert setup.engine.receive().aborted == setup.engine.request_ids
        assert setup.outbox.is_closed
        with pytest.raises(Unavailable):
            setup.client.generate(PROMPT, PARAMS)


@asynchronous
async def test_run_with_failed_inbox_fails_requests():
    setup = Setup()
    await setup.deliver(setup.engine.joined_message())
    stream = setup.client.generate(PROMPT, PARAMS)
    setup.inbox.close()
    with pytest.raises(ChannelClosed):
        await setup.running
    with pytest.raises(EngineFailed, match="no longer hears"):
        await stream.result()
    with pytest.raises(EngineFailed, match="no longer hears"):
        await setup.client.wait_until_ready(5)


def test_run_invalid_message_is_dropped(caplog):
    async def scenario():
        async with attached() as setup:
            stream = setup.client.generate(PROMPT, PARAMS)
            setup.inbox.put_frames([b"junk"])
            await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
            assert (await stream.result()).outputs[0].token_ids == [9]

    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert "dropped an invalid message" in caplog.text


# Requests.


@asynchronous
async def test_stream_iteration_yields_output_as_it_arrives():
    async with attached() as setup:
        ids = setup.ids("hello world")
        stream = setup.client.generate(PROMPT, PARAMS, request_id="mine")
        assert (stream.request_id, stream.prompt_token_ids) == ("mine", [5, 6, 7])
        assert setup.client.num_in_flight == 1
        deltas = stream.__aiter__()
        reading = await start_task(anext(deltas))
        assert not reading.done()
        await setup.engine.send((0, {"token_ids": ids[:1]}))
        first = await reading
        await setup.engine.send((0, {"token_ids": ids[1:2]}))
        await setup.engine.send((0, {"token_ids": ids[2:], "finish_reason": LENGTH}))
        rest = [delta async for delta in deltas]
        assert len(rest) == 1
        assert first.outputs[0].text + rest[0].outputs[0].text == "hello world"
        assert (first.finished, rest[0].finished) == (False, True)
        assert setup.client.num_in_flight == 0
        assert setup.engine.aborted == []
        assert (await stream.result()).outputs[0].text == "hello world"


@asynchronous
async def test_stream_result_returns_whole_output():
    async with attached() as setup:
        stream = setup.client.generate(Prompt("hello"), SamplingParams(n=2))
        waiting = await start_task(stream.result())
        await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}), (1, {"token_ids": [8]}))
        assert not waiting.done()
        await setup.engine.send((1, {"token_ids": [7], "finish_reason": LENGTH}))
        output = await waiting
        assert (output.prompt, output.prompt_token_ids) == (
            "hello",
            setup.engine.requests[setup.engine.request_ids[0]].prompt_token_ids,
        )
        assert [choice.token_ids for choice in output.outputs] == [[9], [8, 7]]
        assert setup.client.num_in_flight == 0


@asynchronous
async def test_stop_string_ends_request_in_client_and_engine():
    async with attached() as setup:
        ids = setup.ids("hello world")
        stream = setup.client.generate(PROMPT, SamplingParams(stop="lo w"))
        await setup.engine.send((0, {"token_ids": ids}))
        assert setup.engine.receive().aborted == setup.engine.request_ids
        output = await stream.result()
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("hel", "stop")
        # Chunks that the engine sent before it received the abort are dropped.
        await setup.engine.send((0, {"token_ids": ids}))
        await setup.engine.send((0, {"finish_reason": FinishReason.ABORT}))
        assert await stream.result() == output


@asynchronous
async def test_output_has_the_attributes_that_users_of_vllm_read():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(logprobs=1))
        reported = TokenLogprobs([9, 8], [-1.5, -0.5], 2)
        await setup.engine.send((0, {"token_ids": [9], "logprobs": [reported], "finish_reason": FinishReason.LENGTH}))
        output = await stream.result()
    (completion,) = output.outputs
    assert completion.logprobs[0][9].logprob == completion.cumulative_logprob == -1.5
    assert [(entry.rank, entry.logprob) for entry in completion.logprobs[0].values()] == [(2, -1.5), (1, -0.5)]
    assert completion.finished() and completion.stop_reason is completion.routed_experts is None
    for name in ("lora_request", "encoder_prompt", "encoder_prompt_token_ids", "kv_transfer_params"):
        assert getattr(output, name) is None
    times = output.metrics
    assert times.num_generation_tokens == 1 and times.first_token_latency >= 0
    assert 0 < times.first_token_ts <= times.last_token_ts


@asynchronous
async def test_output_flat_logprobs_equal_the_lists():
    reported = [TokenLogprobs([9, 8], [-1.5, -0.5], 2), TokenLogprobs([7, 7], [-0.1, -0.1], 1)]
    prompt = PromptLogprobs(1, np.array([[6], [7]]), np.array([[-1.0], [-2.0]]), np.array([3, 1]))
    chunk = {"token_ids": [9, 7], "logprobs": reported, "prompt_logprobs": prompt, "finish_reason": LENGTH}
    outputs = []
    for flat in (False, True):
        async with attached() as setup:
            params = SamplingParams(logprobs=1, prompt_logprobs=0, flat_logprobs=flat)
            stream = setup.client.generate(PROMPT, params)
            await setup.engine.send((0, chunk))
            outputs.append(await stream.result())
    listed, flat = (output.outputs[0].logprobs for output in outputs)
    assert isinstance(flat, FlatLogprobs) and list(flat) == listed and flat[-1] == listed[-1]
    assert list(flat[1:]) == listed[1:]
    assert (flat.token_ids, flat.ranks, flat.end_indices) == ([9, 8, 7], [2, 1, 1], [2, 3])
    assert [position or None for position in outputs[1].prompt_logprobs] == outputs[0].prompt_logprobs


@asynchronous
async def test_generate_params_assigned_after_construction_are_checked():
    async with attached() as setup:
        params = SamplingParams()
        params.logprobs, params.skip_reading_prefix_cache = -1, True
        with pytest.raises(InvalidRequest, match="`logprobs` must be at most"):
            setup.client.generate(PROMPT, params)
        params.logprobs = 3
        setup.client.generate(PROMPT, params)
        (sent,) = setup.engine.receive().requests.values()
        assert sent.skip_reading_prefix_cache
        params.top_p = 7.0
        with pytest.raises(InvalidRequest, match="`top_p`"):
            setup.client.generate(PROMPT, params)


@asynchronous
async def test_stop_string_in_last_chunk_sends_no_abort():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(stop="lo w"))
        await setup.engine.send((0, {"token_ids": setup.ids("hello world"), "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].finish_reason == "stop"
        assert setup.engine.receive().aborted == []


@asynchronous
async def test_abort_keeps_output_and_is_sent_once():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(n=2))
        await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}), (1, {"token_ids": [8]}))
        stream.abort()
        stream.abort()
        assert setup.engine.receive().aborted == [setup.engine.request_ids[1]]
        output = await stream.result()
        assert [choice.finish_reason for choice in output.outputs] == ["length", "abort"]
        assert [choice.token_ids for choice in output.outputs] == [[9], [8]]
        assert setup.client.num_in_flight == 0


@asynchronous
async def test_abort_ends_iteration_with_finish_reason():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        reading = await start_task(anext(stream.__aiter__()))
        stream.abort()
        delta = await reading
        assert (delta.finished, delta.outputs[0].finish_reason) == (True, "abort")


@asynchronous
async def test_request_id_after_abort_can_be_reused():
    async with attached() as setup:
        setup.client.generate(PROMPT, PARAMS, request_id="x").abort()
        stream = setup.client.generate(PROMPT, PARAMS, request_id="x")
        await setup.engine.send((0, {"token_ids": [1], "finish_reason": FinishReason.ABORT}))
        await setup.engine.send((1, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].token_ids == [9]


@asynchronous
async def test_stream_left_early_aborts():
    async with attached() as setup:
        closed = setup.client.generate(PROMPT, PARAMS).__aiter__()
        broken = setup.client.generate(PROMPT, PARAMS)
        block = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.send(*((number, {"token_ids": [9]}) for number in range(3)))
        await anext(closed)
        await closed.aclose()
        async for _ in broken:
            break
        await asyncio.sleep(0)
        with pytest.raises(ZeroDivisionError):
            async with block:
                raise ZeroDivisionError
        await asyncio.sleep(0)
        assert setup.client.num_in_flight == 0
        assert sorted(setup.engine.receive().aborted) == sorted(setup.engine.request_ids)


@pytest.mark.parametrize("way", ["result", "deltas"])
def test_stream_cancelled_task_aborts(way):
    async def scenario():
        async with attached() as setup:
            stream = setup.client.generate(PROMPT, PARAMS)
            task = await start_task(stream.result() if way == "result" else anext(stream.__aiter__()))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            assert task.cancelled()
            assert setup.engine.receive().aborted == setup.engine.request_ids
            assert setup.client.num_in_flight == 0

    asyncio.run(asyncio.wait_for(scenario(), 10))


@asynchronous
async def test_request_with_engine_error_fails_alone():
    async with attached() as setup:
        failing = setup.client.generate(PROMPT, SamplingParams(n=3))
        other = setup.client.generate(PROMPT, PARAMS)
        deltas = failing.__aiter__()
        await setup.engine.send((0, {"token_ids": [9]}))
        await setup.engine.send((1, {"finish_reason": FinishReason.ERROR, "error": "not a number"}))
        assert (await anext(deltas)).outputs[0].token_ids == [9]
        with pytest.raises(RequestFailed, match="not a number"):
            await anext(deltas)
        with pytest.raises(RequestFailed, match="not a number"):
            await failing.result()
        assert sorted(setup.engine.receive().aborted) == [setup.engine.request_ids[0], setup.engine.request_ids[2]]
        await setup.engine.send((3, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await other.result()).finished


@asynchronous
async def test_last_engine_left_fails_requests_with_cause():
    async with attached() as setup:
        reader, waiter = (setup.client.generate(PROMPT, PARAMS) for _ in range(2))
        reading, waiting = await start_task(anext(reader.__aiter__())), await start_task(waiter.result())
        await setup.engine.leave(returns=False)
        for task in (reading, waiting):
            with pytest.raises(EngineFailed, match="engine-0 ended: killed by SIGKILL"):
                await task
        assert setup.client.num_in_flight == 0
        assert setup.client.engine_info is None
        with pytest.raises(Unavailable, match="SIGKILL") as raised:
            setup.client.generate(PROMPT, PARAMS)
        assert raised.value.retry_after == 1


@asynchronous
async def test_generate_invalid_request_raises_and_is_not_in_flight():
    async with attached() as setup:
        setup.client.generate(PROMPT, PARAMS, request_id="x")
        for options in ({"request_id": "x"}, {"request_id": 5}, {"priority": "high"}, {"cache_salt": None}):
            with pytest.raises(InvalidRequest) as raised:
                setup.client.generate(PROMPT, PARAMS, **options)
            assert raised.value.param == next(iter(options))
        with pytest.raises(InvalidRequest, match="logprobs"):
            setup.client.generate(PROMPT, SamplingParams(logprobs=21))
        with pytest.raises(InvalidRequest, match="empty"):
            setup.client.generate(Prompt(""), PARAMS)
        assert setup.client.num_in_flight == 1
        assert len(setup.engine.receive().request_ids) == 1


def seeds_of(*, seed, params=PARAMS):
    async def scenario():
        async with attached(seed=seed) as setup:
            for _ in range(3):
                setup.client.generate(PROMPT, params)
            setup.engine.receive()
            return [request.sampling.seed for request in setup.engine.requests.values()]

    return asyncio.run(scenario())


def test_generate_without_seed_draws_one():
    assert len({*seeds_of(seed=None), *seeds_of(seed=None)}) == 6
    assert seeds_of(seed=5) == seeds_of(seed=5)
    assert len({*seeds_of(seed=5), *seeds_of(seed=6)}) == 6
    assert seeds_of(seed=5, params=SamplingParams(seed=-3)) == [-3, -3, -3]


# Checkpoints.


@pytest.mark.parametrize("error", [None, InvalidRequest("there is no such directory", param="model")])
def test_checkpoint_is_fetched_beside_the_event_loop(error):
    def prepare(options):
        assert threading.current_thread() is not threading.main_thread()
        if error is not None:
            raise error
        return {**options, "revision": "pinned"}

    async def scenario():
        async with attached(prepare_checkpoint=prepare) as setup, asyncio.timeout(10):
            await setup.deliver(FetchCheckpoint("upgrade", {"model": "name"}))
            while not (sent := [it for it in setup.network.mail["supervisor"] if isinstance(it, CheckpointFetched)]):
                await asyncio.sleep(0.001)
            return sent

    options, failure = {"model": "name", "revision": "pinned"}, None
    if error is not None:
        options, failure = {}, Failure.of(error)
    assert asyncio.run(scenario()) == [CheckpointFetched(CLIENT, "upgrade", options=options, failure=failure)]


# Creation.


def made_from(directory, **options):
    config = build_config(model=str(directory), **options)

    async def scenario():
        setup = Setup()
        await setup.client.close()
        await setup.running
        return Client.create(CLIENT, config, inbox=setup.inbox, outbox=setup.outbox)

    return asyncio.run(scenario())


def test_create_reads_tokenizer_of_model(tmp_path):
    directory = write_checkpoint(tmp_path / "model", generation_config={"eos_token_id": 7})
    client = made_from(directory)
    assert (
        client.tokenizer.decode(client.tokenizer.encode("hi", add_special_tokens=True), skip_special_tokens=True)
        == "hi"
    )
    assert client.tokenizer.eos_token_ids == (7,)


def test_create_with_tokenizer_and_template_elsewhere_reads_them(tmp_path):
    write_checkpoint(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        made_from(tmp_path / "model")
    other = write_checkpoint(tmp_path / "other", "unigram", config=None)
    (tmp_path / "t.jinja").write_text("mine")
    client = made_from(tmp_path / "model", tokenizer=str(other), chat_template=str(tmp_path / "t.jinja"))
    assert client.tokenizer.apply_chat_template([{"role": "user", "content": ""}], add_generation_prompt=True) == "mine"
    assert made_from(tmp_path / "model", skip_tokenizer_init=True).tokenizer is None


@asynchronous
async def test_generate_without_tokenizer_returns_tokens_without_text():
    async with attached(kind=None) as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(logprobs=0))
        await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        output = (await stream.result()).outputs[0]
        assert (output.text, output.token_ids) == ("", [9])
        with pytest.raises(InvalidRequest, match="skip_tokenizer_init"):
            setup.client.generate(Prompt("hi"), PARAMS)


@asynchronous
async def test_generate_when_send_fails_is_not_in_flight():
    async with attached() as setup:
        setup.outbox.refuses = True
        with pytest.raises(TypeError):
            setup.client.generate(PROMPT, PARAMS, timeout=5)
        assert setup.client.num_in_flight == 0
