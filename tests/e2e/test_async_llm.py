"""`AsyncLLM`: requests and calls from event loops of the program."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import chain

import msgspec
import pytest
from checkpoints import make_checkpoint
from oracle import oracle
from processes import children_of

from eagleray import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from eagleray.errors import ConfigError, DeadlineExceeded, InvalidRequest, WrongState

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
LONG = msgspec.structs.replace(GREEDY, max_tokens=380)
SECONDS = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama")


@pytest.fixture(scope="module")
def llm(checkpoint):
    args = AsyncEngineArgs(str(checkpoint), num_threads=1, max_model_len=400, max_engine_restarts=3)
    args.data_parallel_size = 2
    llm = AsyncLLM.from_engine_args(args)
    yield llm
    llm.shutdown()


def run(work):
    async def limited():
        async with asyncio.timeout(SECONDS):
            return await work

    return asyncio.run(limited())


async def outputs_of(llm, prompt, params, **options) -> list:
    return [output async for output in llm.generate(prompt, params, **options)]


def streams_since(llm, earlier):
    """Streams of the requests that were sent after the ids `earlier` were read: those of requests that have ended may
    be there for a moment."""
    return [stream for name, stream in list(llm._streams.items()) if name not in earlier]


def replaced(**changes) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **changes)


def test_async_generate_kinds_of_output_have_the_same_tokens(llm, checkpoint):
    async def work():
        kinds = [replaced(output_kind=kind, logprobs=1) for kind in RequestOutputKind]
        return await asyncio.gather(*(outputs_of(llm, "Hello world", params) for params in kinds))

    whole, deltas, final = run(work())
    (last,) = final
    oracle(checkpoint).assert_greedy(last.prompt_token_ids, last.outputs[0].token_ids)
    assert len(whole) > 1 and len(deltas) > 1
    assert whole[-1].outputs == last.outputs
    assert whole[-1].finished and deltas[-1].finished and last.finished
    assert list(chain.from_iterable(output.outputs[0].token_ids for output in deltas)) == last.outputs[0].token_ids
    assert "".join(output.outputs[0].text for output in deltas) == last.outputs[0].text
    assert list(chain.from_iterable(output.outputs[0].logprobs for output in deltas)) == last.outputs[0].logprobs
    assert deltas[-1].outputs[0].finish_reason == "length"


def test_async_generate_works_in_every_event_loop(llm):
    texts = {run(outputs_of(llm, "Hello", GREEDY))[-1].outputs[0].text for _ in range(2)}
    assert len(texts) == 1


def test_async_abort_ends_the_iterator_with_what_there_is(llm):
    async def work():
        received = []
        async for output in llm.generate("Hello", LONG, "mine"):
            received.append(output)
            if len(received) == 3:
                await llm.abort(["mine", "unknown"])
        return received

    *_, last = run(work())
    assert last.finished and last.request_id == "mine"
    assert last.outputs[0].finish_reason == "abort"
    assert 0 < len(last.outputs[0].token_ids) < 380


def test_async_generate_left_or_cancelled_leaves_no_request(llm):
    async def work():
        async for _ in llm.generate("Hello", LONG):
            break
        task = asyncio.create_task(outputs_of(llm, "Hello", LONG))
        while not llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await llm.wait_for_requests_to_drain()
        return task.cancelled()

    assert run(work())
    assert llm.get_num_unfinished_requests() == 0


def test_async_generate_cancelled_before_the_stream_came_leaves_no_request(llm):
    async def work():
        task = asyncio.create_task(outputs_of(llm, "Hello", LONG))
        await asyncio.sleep(0)
        while not llm.get_num_unfinished_requests():
            time.sleep(0.001)  # the program's loop does not run, so the task has not got its stream yet
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await llm.wait_for_requests_to_drain()
        return task.cancelled()

    assert run(work())
    assert not llm._streams


def test_async_generate_cancelled_before_it_is_sent_sends_nothing(llm):
    async def work():
        llm._thread.call_soon(time.sleep, 0.2)  # the instance's loop has not come to the request yet
        task = asyncio.create_task(outputs_of(llm, "Hello", LONG))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await llm.get_weight_version()
        return task.cancelled()

    assert run(work())
    assert not llm._streams and llm.get_num_unfinished_requests() == 0


def test_async_wait_for_drain_names_the_number_that_is_left(llm):
    async def work():
        task = asyncio.create_task(outputs_of(llm, "Hello", LONG, request_id="long"))
        while not llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded, match="still 1 unfinished"):
            await llm.wait_for_requests_to_drain(0.01)
        await llm.abort("long")
        await task

    run(work())


def test_async_generate_trace_headers_reach_the_client(llm, monkeypatch):
    client, sent = llm._instance.client, []
    send = client.generate
    monkeypatch.setattr(client, "generate", lambda *args, **options: sent.append(options) or send(*args, **options))
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    run(outputs_of(llm, "Hello", replaced(max_tokens=1), trace_headers=headers))
    assert [options["trace_headers"] for options in sent] == [headers]


def test_async_generate_takes_a_dictionary_of_parameters(llm):
    (*_, last) = run(outputs_of(llm, "Hello", {"max_tokens": 3, "ignore_eos": True}))
    assert len(last.outputs[0].token_ids) == 3
    with pytest.raises(InvalidRequest, match="a dictionary of its fields, but got int"):
        run(outputs_of(llm, "Hello", 3))


def test_async_generate_wrong_prompt_raises_at_the_first_output(llm):
    with pytest.raises(InvalidRequest, match="empty"):
        run(outputs_of(llm, "", GREEDY))
    with pytest.raises(InvalidRequest, match="no field 'text'"):
        run(outputs_of(llm, {"text": "x"}, GREEDY))
    run(llm.check_health())
    assert llm.is_running and not llm.errored


def test_async_generate_killed_engine_loses_nothing(llm):
    async def work(*, kill: bool):
        earlier = set(llm._streams)
        requests = [asyncio.create_task(outputs_of(llm, [index + 5] * 3, LONG)) for index in range(8)]
        if kill:
            while [bool(stream.num_tokens) for stream in streams_since(llm, earlier)] != [True] * 8:
                await asyncio.sleep(0.01)
            os.kill(children_of(os.getpid())[0], signal.SIGKILL)
        return [outputs[-1].outputs[0].token_ids for outputs in await asyncio.gather(*requests)]

    assert run(work(kill=True)) == run(work(kill=False))


def test_async_pause_keep_freezes_requests_until_resume(llm):
    async def work(*, pause: bool):
        earlier = set(llm._streams)
        requests = [asyncio.create_task(outputs_of(llm, [index + 5] * 3, LONG)) for index in range(8)]
        if pause:
            while not any(stream.num_tokens for stream in streams_since(llm, earlier)):
                await asyncio.sleep(0.01)
            answer = await llm.pause_generation(mode="keep")
            assert answer["num_aborted"] == 0
            assert await llm.is_paused()
            before = [stream.num_tokens for stream in streams_since(llm, earlier)]
            late = asyncio.create_task(outputs_of(llm, [3, 4], GREEDY, request_id="late"))
            await asyncio.sleep(0.3)
            assert [stream.num_tokens for stream in streams_since(llm, earlier)][:8] == before
            assert not late.done()
            await llm.resume_generation()
            assert (await late)[-1].outputs[0].finish_reason == "length"
            assert not await llm.is_paused()
        return [outputs[-1].outputs[0].token_ids for outputs in await asyncio.gather(*requests)]

    assert run(work(pause=True)) == run(work(pause=False))


def test_async_pause_abort_delivers_what_there_is(llm):
    async def work():
        earlier = set(llm._streams)
        requests = [asyncio.create_task(outputs_of(llm, [index + 5] * 3, LONG)) for index in range(4)]
        while not any(stream.num_tokens for stream in streams_since(llm, earlier)):
            await asyncio.sleep(0.01)
        answer = await llm.pause_generation()
        outputs = [outputs[-1].outputs[0] for outputs in await asyncio.gather(*requests)]
        await llm.resume_generation()
        return answer, outputs

    answer, outputs = run(work())
    assert answer["num_aborted"] == 4
    assert {output.finish_reason for output in outputs} == {"abort"}
    assert any(output.token_ids for output in outputs)


def test_async_sleep_returns_memory_and_wakes_with_the_same_tokens(llm):
    async def work():
        expected = await outputs_of(llm, "Hello", GREEDY)
        answer = await llm.sleep(level=1)
        assert answer["freed_bytes"] > 0
        assert await llm.is_sleeping()
        with pytest.raises(WrongState, match="wake"):
            await llm.resume_generation()
        waiting = asyncio.create_task(outputs_of(llm, "Hello", GREEDY))
        assert not await llm.wake_up(["weights"])
        assert await llm.wake_up(["kv_cache"])
        return expected[-1].outputs, (await waiting)[-1].outputs

    expected, after = run(work())
    assert after == expected


def test_async_control_wrong_values_are_refused(llm):
    for work, message in [
        (llm.pause_generation(mode="stop"), "`mode` must be one of abort, wait, keep"),
        (llm.sleep(level=3), "`level` must be"),
        (llm.wake_up(["cache"]), "`tags` may have weights, kv_cache, scheduling"),
        (llm.update_weights({"names": []}), "`update_info`"),
        (llm.start_weight_update(is_checkpoint_format=False), "`is_checkpoint_format`"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            run(work)
    with pytest.raises(WrongState, match="start_weight_update"):
        run(llm.finish_weight_update())


def test_async_update_weight_version_names_the_weights(llm):
    assert run(llm.get_weight_version()) == "default"
    run(llm.update_weight_version("step-1"))
    info = run(llm.get_weight_info())
    assert (info["weight_version"], info["update"]) == ("step-1", 0)
    assert len(info["engines"]) == 2


def test_engine_args_unknown_option_names_the_similar_one(checkpoint):
    with pytest.raises(ConfigError, match="no option `max_modl_len`; did you mean `max_model_len`"):
        AsyncEngineArgs(str(checkpoint), max_modl_len=1)
    with pytest.raises(ConfigError, match="`port` is for the HTTP server"):
        AsyncEngineArgs(str(checkpoint), port=1)
    args = AsyncEngineArgs(str(checkpoint), max_model_len=100)
    assert (args.max_model_len, args.tensor_parallel_size) == (100, 1)
    args.max_model_len = 0
    with pytest.raises(ConfigError, match="`max_model_len`"):
        AsyncLLM.from_engine_args(args)


def test_async_llm_shut_down_refuses_requests(checkpoint):
    llm = AsyncLLM(str(checkpoint), num_threads=1, max_model_len=400)

    async def work():
        task = asyncio.create_task(outputs_of(llm, "Hello", LONG))
        while not llm.get_num_unfinished_requests():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(llm.shutdown)
        return (await task)[-1]

    assert run(work()).outputs[0].finish_reason == "abort"
    with pytest.raises(InvalidRequest, match="closed"):
        run(outputs_of(llm, "Hello", GREEDY))
    assert not llm.is_running
