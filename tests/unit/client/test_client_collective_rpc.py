"""Calls of the worker extension, with the test in the role of the engines."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from client_fakes import CLIENT, FakeEngine, Setup, asynchronous, attached

from eagleray.client import collective_rpc
from eagleray.errors import DeadlineExceeded, EngineFailed, InvalidRequest, RequestFailed, Unavailable
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Stop
from eagleray.messages.outputs import WorkersReturned
from eagleray.messages.plain import pack, unpack_arguments


async def begin(setup, method="weigh", *args, timeout=None, **kwargs):
    """Return a call that was sent, as a task."""
    task = asyncio.create_task(setup.client.call_workers(method, args, kwargs, timeout=timeout))
    await setup.deliver()
    setup.engine.receive()
    return task


def answer(setup, number=-1, **fields):
    return setup.deliver(WorkersReturned(call_id=setup.engine.calls[number].call_id, **fields))


def failed(error):
    try:
        raise error
    except Exception as raised:
        return Failure.of(raised)


@asynchronous
async def test_call_workers_returns_results_by_rank():
    async with attached() as setup:
        task = await begin(setup, "weigh", 1, np.arange(3), timeout=5, name="x")
        (call,) = setup.engine.calls
        assert (call.client, call.method, call.timeout) == (CLIENT, "weigh", 5)
        args, kwargs = unpack_arguments(call.arguments)
        assert (args[0], args[1].tolist(), kwargs) == (1, [0, 1, 2], {"name": "x"})
        assert (setup.client.num_in_flight, setup.client.num_requests) == (1, 0)
        await answer(setup, values=[pack({"rank": 0}), pack(np.float32([1.5]))])
        first, second = await task
        assert first == {"rank": 0}
        assert (second.dtype, second.tolist()) == (np.float32, [1.5])
        assert setup.client.num_in_flight == 0


@asynchronous
async def test_call_workers_several_calls_get_their_own_results():
    async with attached() as setup:
        tasks = [await begin(setup, f"method{number}") for number in range(3)]
        for number in (1, 2, 0):
            await answer(setup, number, values=[pack(number)])
        assert await asyncio.gather(*tasks) == [[0], [1], [2]]


@asynchronous
async def test_call_workers_error_on_rank_names_rank_type_and_message():
    async with attached() as setup:
        task = await begin(setup)
        await answer(setup, failure=failed(KeyError("w")), rank=2)
        with pytest.raises(RequestFailed) as caught:
            await task
        assert str(caught.value) == "`weigh` raised on rank 2: KeyError: 'w'"
        (note,) = caught.value.__notes__
        assert "Traceback" in note
        assert "rank 2" in note


@asynchronous
async def test_call_workers_other_failures_keep_their_kind():
    async with attached() as setup:
        for error, kind, message in (
            (InvalidRequest("no such method"), InvalidRequest, "^no such method$"),
            (
                DeadlineExceeded("no reply from rank 1"),
                DeadlineExceeded,
                "`weigh` on the workers: no reply from rank 1",
            ),
            (RuntimeError("odd"), RequestFailed, "`weigh` on the workers: odd"),
        ):
            task = await begin(setup)
            await answer(setup, failure=failed(error))
            with pytest.raises(kind, match=message):
                await task


@asynchronous
async def test_call_workers_engine_exit_fails_calls_with_cause():
    async with attached() as setup:
        tasks = [await begin(setup), await begin(setup)]
        await setup.engine.leave("killed by SIGKILL")
        for task in tasks:
            with pytest.raises(EngineFailed, match="killed by SIGKILL"):
                await task
        with pytest.raises(Unavailable, match="SIGKILL"):
            await setup.client.call_workers("weigh", timeout=None)


@asynchronous
async def test_call_workers_closed_client_fails_calls():
    async with attached() as setup:
        task = await begin(setup)
        await setup.client.close()
        with pytest.raises(Unavailable, match="closed before the workers had answered"):
            await task
        with pytest.raises(Unavailable):
            await setup.client.call_workers("weigh", timeout=None)


@pytest.fixture
def hasty(monkeypatch):
    """Let the client not wait for the engine's report of a timeout."""
    monkeypatch.setattr(collective_rpc, "REPORT_SECONDS", 0.0)


@pytest.mark.usefixtures("hasty")
@asynchronous
async def test_call_workers_without_reply_times_out():
    async with attached() as setup:
        with pytest.raises(DeadlineExceeded, match=r"`weigh` on the workers: no answer from .* within 0\.05 s"):
            await setup.client.call_workers("weigh", timeout=0.05)
        setup.engine.receive()
        await answer(setup, values=[pack(1)])  # too late
        assert setup.client.num_in_flight == 0
        task = await begin(setup)
        await answer(setup, values=[pack(2)])
        assert await task == [2]


@asynchronous
async def test_call_workers_cancelled_caller_leaves_no_call():
    async with attached() as setup:
        task = await begin(setup)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert setup.client.num_in_flight == 0
        await answer(setup, values=[pack(1)])
        await setup.engine.leave()


@asynchronous
async def test_call_workers_invalid_call_is_not_sent():
    async with attached() as setup:
        call = setup.client.call_workers
        for work, message in (
            (call(len, timeout=None), "`method` is a function, and none is sent to workers"),
            (call(5, timeout=None), "`method` must be a text, but it is a int"),
            (call("weigh", [{"a": {1}}], timeout=None), r"args\[0\]\['a'\]: a value of type builtins.set"),
            (call("weigh", kwargs={"a": object()}, timeout=None), r"kwargs\['a'\]: a value of type builtins.object"),
            (call("weigh", "abc", timeout=None), "args: a list or a tuple is expected"),
            (call("weigh", timeout=0), "`timeout` must be a number of seconds above 0"),
            (call("weigh", timeout=float("inf")), "but it is inf"),
            (call("weigh", timeout="5"), "but it is '5'"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                await work
        assert setup.engine.receive().calls == []


@asynchronous
async def test_call_workers_stopping_or_without_engine_raises():
    setup = Setup()
    with pytest.raises(Unavailable, match="no engine is ready"):
        await setup.client.call_workers("weigh", timeout=None)
    await setup.deliver(setup.engine.joined_message(), Stop(1.0))
    with pytest.raises(Unavailable, match="stopping"):
        await setup.client.call_workers("weigh", timeout=None)
    await setup.client.close()
    await setup.running


@asynchronous
async def test_call_workers_several_engines_returns_results_by_engine():
    async with attached() as setup:
        engines = [await FakeEngine(setup, rank=rank).join() for rank in (2, 1)]
        task = await begin(setup)
        for engine in engines:
            (call,) = engine.receive().calls
            values = [pack([engine.id.rank, worker]) for worker in range(2)]
            await setup.deliver(WorkersReturned(call_id=call.call_id, values=values))
            assert not task.done()
        await answer(setup, values=[pack([0, 0])])
        assert await task == [[0, 0], [1, 0], [1, 1], [2, 0], [2, 1]]


@asynchronous
async def test_call_workers_first_failed_engine_fails_call():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        task = await begin(setup)
        await other.leave("killed by SIGKILL")
        with pytest.raises(EngineFailed, match="engine-1 ended: killed by SIGKILL"):
            await task
        assert setup.client.num_in_flight == 0
        await answer(setup, values=[pack(1)])  # of a call that has failed
        assert await answered(setup) == [3]


async def answered(setup):
    """Return the result of a call that the remaining engine replies to."""
    task = await begin(setup)
    await answer(setup, values=[pack(3)])
    return await task
