"""Engines exit and come back; requests continue, and their readers get the output of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging

import numpy as np
import pytest
from client_engines import OUTPUT_TOKENS, POISON, ComputingEngine, routed_rows, token_at
from client_fakes import INFO, FakeEngine, asynchronous, attached, start_task
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.preprocess import Prompt, child_seed
from eagleray.errors import DeadlineExceeded, EngineFailed, InvalidRequest, Unavailable
from eagleray.identity import EngineId
from eagleray.messages.lifecycle import Stop
from eagleray.messages.outputs import Chunk, Chunks, FinishReason, WorkersReturned
from eagleray.messages.requests import Abort
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.scaling import Draining

PROMPT = Prompt(token_ids=[5, 6, 7])
PARAMS = SamplingParams(temperature=0)
LENGTH = FinishReason.LENGTH


class Observer:
    def __init__(self):
        self.events = []

    def on_resumed(self, num_requests, num_tokens):
        self.events.append(("resumed", num_requests, num_tokens))

    def on_next_token(self, seconds):
        assert 0 <= seconds < 10
        self.events.append("next token")

    def on_failed(self, num_requests):
        self.events.append(("failed", num_requests))


class Fleet:
    """Computing engines by rank. Engines that have exited may still send chunks, too late."""

    def __init__(self, setup):
        self.setup = setup
        self.engines = {}
        self.exited = []

    async def join(self, rank):
        incarnation = sum(engine.id.rank == rank for engine in self.exited)
        self.engines[rank] = await ComputingEngine(self.setup, rank, incarnation).join()
        return self.engines[rank]

    async def kill(self, rank, *, returns=True):
        engine = self.engines.pop(rank)
        self.exited.append(engine)
        await engine.leave(f"killed {len(self.exited)}", returns)

    async def finish(self, rank=0):
        """Run the engines until every request has finished."""
        while self.setup.client.num_in_flight:
            if not self.engines:
                await self.join(rank)
            for engine in list(self.engines.values()):
                await engine.step()
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def fleet_of(num_engines, **options):
    """Yield a setup with `num_engines` computing engines."""
    async with attached(**options) as setup:
        await setup.engine.leave("it cannot compute", returns=False)
        fleet = Fleet(setup)
        for rank in range(num_engines):
            await fleet.join(rank)
        yield setup, fleet


async def run_with_exits(prompt, params, *exits):
    """Return the output and the deltas of a request whose engines exit after these numbers of steps."""
    async with fleet_of(2, max_request_restarts=len(exits)) as (setup, fleet):
        stream = setup.client.generate(prompt, params, request_id="x")
        deltas = []
        reading = await start_task(collect(stream, deltas))
        for steps in exits:
            busy = [rank for rank, engine in fleet.engines.items() if engine.has_work]
            if not busy:  # the request has finished before
                break
            (rank,) = busy
            await fleet.engines[rank].step(steps)
            await fleet.kill(rank)
            await fleet.exited[-1].step(2)  # too late
            if not fleet.engines:
                await fleet.join(rank)
        await fleet.finish()
        await reading
        return await stream.result(), deltas


async def collect(stream, deltas):
    async for delta in stream:
        deltas.append(delta)


def joined(deltas, index):
    """Return a completion as a reader of the deltas gets it."""
    parts = [output for delta in deltas for output in delta.outputs if output.index == index]
    text, token_ids = "".join(part.text for part in parts), [token for part in parts for token in part.token_ids]
    logprobs = [entry for part in parts for entry in part.logprobs or []]
    return text, token_ids, logprobs, parts[-1].finish_reason, parts[-1].stop_reason


def check_equal(prompt, params, *exits):
    async def scenario():
        expected, _ = await run_with_exits(prompt, params)
        output, deltas = await run_with_exits(prompt, params, *exits)
        output.num_cached_tokens = expected.num_cached_tokens
        assert output == expected
        for completion in expected.outputs:
            assert joined(deltas, completion.index) == (
                completion.text,
                completion.token_ids,
                completion.logprobs or [],
                completion.finish_reason,
                completion.stop_reason,
            )
        assert [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None] == (
            [] if expected.prompt_logprobs is None else [expected.prompt_logprobs]
        )
        return expected

    return asyncio.run(asyncio.wait_for(scenario(), 20))


# Output over restarts.


@pytest.mark.parametrize("exits", [(0,), (1,), (3,), (2, 4), (9, 5), (0, 0, 12, 3)])
def test_restart_output_equals_undisturbed_run(exits):
    expected = check_equal(PROMPT, SamplingParams(seed=3, max_tokens=30), *exits)
    assert expected.outputs[0].token_ids == [token_at(3, place) for place in range(30)]


def test_restart_within_character_keeps_text():
    for steps in range(2, 12):
        expected = check_equal(PROMPT, SamplingParams(seed=0, max_tokens=12), steps, 4)
        assert "ö" in expected.outputs[0].text and "😀" in expected.outputs[0].text


@pytest.mark.parametrize("stop", ["and 👍", "😀 a", [" hello", "lo 東"]])
def test_restart_within_stop_string_still_stops(stop):
    for steps in range(2, 30, 3):
        expected = check_equal(PROMPT, SamplingParams(seed=0, max_tokens=40, stop=stop), steps, 3)
        assert expected.outputs[0].finish_reason == "stop"


def test_restart_before_stop_token_still_stops():
    params = SamplingParams(seed=0, max_tokens=40, stop_token_ids=[OUTPUT_TOKENS[9]], min_tokens=3)
    assert check_equal(PROMPT, params, 5, 2).outputs[0].stop_reason == OUTPUT_TOKENS[9]


@pytest.mark.parametrize("exits", [(1,), (2,), (3,), (5, 1), (1, 1, 1), (8, 9)])
def test_restart_logprobs_equal_undisturbed_run(exits):
    prompt = Prompt(token_ids=list(range(5, 14)))
    expected = check_equal(prompt, SamplingParams(seed=1, max_tokens=9, logprobs=0, prompt_logprobs=0), *exits)
    assert len(expected.prompt_logprobs) == 9
    assert expected.outputs[0].cumulative_logprob == -sum(range(1, 10)) / 4


def test_restart_prompt_logprobs_continue_at_first_missing_position():
    async def scenario():
        async with fleet_of(2) as (setup, fleet):
            prompt = Prompt(token_ids=list(range(5, 14)))
            stream = setup.client.generate(prompt, SamplingParams(prompt_logprobs=0), rank=0)
            await fleet.engines[0].step(2)  # positions 1 to 4
            await fleet.kill(0)
            successor = (await fleet.join(0)).receive()
            assert successor.requests[successor.request_ids[0]].prompt_logprobs_from == 5
            stream.abort()

    asyncio.run(asyncio.wait_for(scenario(), 10))


@pytest.mark.parametrize("exits", [(), (1,), (2,), (3,), (5, 1), (0, 1, 1), (8, 9)])
@pytest.mark.parametrize("start", [0, 4, 9])
def test_restart_routed_experts_are_complete(start, exits):
    prompt = Prompt(token_ids=list(range(5, 14)))
    params = SamplingParams(
        n=2, seed=1, max_tokens=7, return_routed_experts=True, routed_experts_prompt_start=start, prompt_logprobs=0
    )

    async def scenario():
        output, deltas = await run_with_exits(prompt, params, *exits)
        for completion in output.outputs:
            token_ids = [*prompt.token_ids, *completion.token_ids]
            expected = routed_rows(token_ids, start, len(token_ids) - 1)
            assert np.array_equal(completion.routed_experts, expected)
            assert (completion.routed_experts.dtype, completion.routed_experts_start) == (np.uint16, start)
            parts = [part for delta in deltas for part in delta.outputs if part.index == completion.index]
            parts = [part for part in parts if part.routed_experts is not None]
            assert np.array_equal(np.concatenate([part.routed_experts for part in parts]), expected)
            starts = np.cumsum([start, *(len(part.routed_experts) for part in parts)]).tolist()
            assert [part.routed_experts_start for part in parts] == starts[:-1]

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_restart_routed_experts_continue_at_first_missing_position():
    async def scenario():
        async with fleet_of(2) as (setup, fleet):
            prompt = Prompt(token_ids=list(range(5, 14)))
            stream = setup.client.generate(prompt, SamplingParams(return_routed_experts=True), rank=0)
            await fleet.engines[0].step(2)  # positions 0 to 3
            await fleet.kill(0)
            successor = (await fleet.join(0)).receive()
            assert successor.requests[successor.request_ids[0]].routed_experts_from == 4
            stream.abort()
            (output,) = (await stream.result()).outputs
            assert np.array_equal(output.routed_experts, routed_rows(prompt.token_ids, 0, 4))

    asyncio.run(asyncio.wait_for(scenario(), 10))


def length_of(seed, stop_token_id):
    """Return the number of tokens up to this one, at most 20."""
    return next((place + 1 for place in range(20) if token_at(seed, place) == stop_token_id), 20)


@asynchronous
async def test_restart_resends_only_unfinished_completions():
    stop = OUTPUT_TOKENS[4]
    seed = next(
        seed for seed in itertools.count() if len({length_of(child_seed(seed, index), stop) for index in range(3)}) == 3
    )
    seeds = [child_seed(seed, index) for index in range(3)]
    lengths = [length_of(one, stop) for one in seeds]
    async with fleet_of(2) as (setup, fleet):
        params = SamplingParams(n=3, seed=seed, max_tokens=20, stop_token_ids=[stop])
        stream = setup.client.generate(PROMPT, params, rank=0)
        await fleet.engines[0].step(1 + min(lengths))
        await fleet.kill(0)
        successor = (await fleet.join(0)).receive()
        sent = [message.sampling.seed for message in successor.requests.values()]
        assert sent == [one for one, length in zip(seeds, lengths, strict=True) if length > min(lengths)]
        await fleet.finish()
        for output, one, length in zip((await stream.result()).outputs, seeds, lengths, strict=True):
            assert output.token_ids == [token_at(one, place) for place in range(length)]


def test_restart_several_completions_equal_undisturbed_run():
    check_equal(PROMPT, SamplingParams(n=3, seed=5, max_tokens=15, logprobs=0, prompt_logprobs=0), 4, 1, 7)


@asynchronous
async def test_restart_counts_cached_tokens_of_first_engine_with_output():
    async with fleet_of(2) as (setup, fleet):
        untouched = setup.client.generate(PROMPT, PARAMS, rank=0)
        begun = setup.client.generate(PROMPT, PARAMS, rank=1)
        await fleet.engines[1].step(2)
        await fleet.kill(0)
        await fleet.kill(1)
        await fleet.join(0)
        await fleet.join(1)
        await fleet.finish()
        assert (await begun.result()).num_cached_tokens == 8
        assert (await untouched.result()).num_cached_tokens == 8  # of the second incarnation: the first sent nothing


ACTIONS = st.tuples(st.sampled_from(["step", "step", "step", "kill", "join", "late"]), st.integers(0, 1))


@settings(max_examples=60, deadline=None)
@given(actions=st.lists(ACTIONS, max_size=40), chunked=st.booleans())
def test_restart_any_order_of_exits_keeps_outputs(actions, chunked):
    async def scenario():
        async with fleet_of(2, max_request_restarts=1000) as (setup, fleet):
            prompt = Prompt(token_ids=list(range(5, 5 + (9 if chunked else 3))))
            streams = [
                setup.client.generate(prompt, SamplingParams(seed=1, max_tokens=12, logprobs=0)),
                setup.client.generate(
                    prompt, SamplingParams(seed=0, max_tokens=40, stop="and 👍", return_routed_experts=True)
                ),
                setup.client.generate(
                    prompt, SamplingParams(seed=5, n=3, max_tokens=7, prompt_logprobs=0, return_routed_experts=True)
                ),
                setup.client.generate(prompt, SamplingParams(seed=9, max_tokens=9), session="s"),
            ]
            for action, rank in actions:
                match action:
                    case "step" if rank in fleet.engines:
                        await fleet.engines[rank].step()
                    case "kill" if rank in fleet.engines:
                        await fleet.kill(rank)
                    case "join" if rank not in fleet.engines:
                        await fleet.join(rank)
                    case "late" if fleet.exited:
                        await fleet.exited[rank - 1].step()
            await fleet.finish()
            first, stopped, several, last = [await stream.result() for stream in streams]
        assert first.outputs[0].token_ids == [token_at(1, place) for place in range(12)]
        assert first.outputs[0].cumulative_logprob == -sum(range(1, 13)) / 4
        assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("Größe 😀 ", "stop")
        assert [len(output.token_ids) for output in several.outputs] == [7, 7, 7]
        assert several.prompt_logprobs[0] is None
        logprobs = [
            position[token_id].logprob
            for position, token_id in list(zip(several.prompt_logprobs, prompt.token_ids, strict=True))[1:]
        ]
        assert logprobs == [-place / 4 for place in range(1, len(prompt.token_ids))]
        assert last.outputs[0].token_ids == [token_at(9, place) for place in range(9)]
        assert last.outputs[0].routed_experts is None
        for output in (*stopped.outputs, *several.outputs):
            token_ids = [*prompt.token_ids, *output.token_ids]
            assert np.array_equal(output.routed_experts, routed_rows(token_ids, 0, len(token_ids) - 1))

    asyncio.run(asyncio.wait_for(scenario(), 30))


# Messages of former engines.


@asynchronous
async def test_deliver_chunk_from_former_engine_is_dropped():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        stream = setup.client.generate(PROMPT, PARAMS, rank=0)
        await setup.engine.send((0, {"token_ids": [9]}))
        await setup.engine.leave()
        successor = await FakeEngine(setup, incarnation=1).join()
        (name,) = successor.receive().request_ids
        assert name != setup.engine.request_ids[0]
        await setup.engine.send((0, {"token_ids": [10]}))
        for wrong_engine in (setup.engine, other):
            await setup.deliver(Chunks(wrong_engine.id, [Chunk(request_id=name, token_ids=[11])]))
        await successor.send((0, {"token_ids": [12], "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].token_ids == [9, 12]


@asynchronous
async def test_abort_resumed_request_aborts_in_its_new_engine():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        streams = [setup.client.generate(PROMPT, PARAMS, rank=0), setup.client.generate(PROMPT, PARAMS)]
        streams[1].abort()
        await setup.engine.leave()
        parked = streams[0]
        parked.abort()  # queued, so no engine gets an abort
        assert (await parked.result()).outputs[0].finish_reason == "abort"
        moved = setup.client.generate(PROMPT, SamplingParams(stop="hello"))
        await other.leave()
        successor = await FakeEngine(setup, rank=1, incarnation=1).join()
        await successor.send((0, {"token_ids": setup.ids("hello")}))
        assert successor.receive().aborted == successor.request_ids
        assert (await moved.result()).outputs[0].finish_reason == "stop"
        assert setup.client.num_in_flight == 0


@asynchronous
async def test_on_engine_left_after_replacement_joined_resumes_there():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        successor = await FakeEngine(setup, incarnation=1).join()
        await setup.engine.leave()
        assert not setup.client.expects_engines
        assert list(setup.client.engines) == [successor.id]
        await successor.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].token_ids == [9]


# Requests without an engine.


@asynchronous
async def test_requests_without_engine_wait_for_its_return():
    async with attached() as setup:
        running = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave("killed")
        assert setup.client.expects_engines
        assert setup.client.cause == "engine-0 ended: killed"
        assert (setup.client.engines, setup.client.engine_info) == ({}, INFO)
        new = setup.client.generate(PROMPT, PARAMS)
        waiting = [await start_task(stream.result()) for stream in (running, new)]
        assert not any(task.done() for task in waiting)
        successor = await FakeEngine(setup, incarnation=1).join()
        assert (setup.client.expects_engines, setup.client.cause) == (False, None)
        await successor.send(*((number, {"token_ids": [number], "finish_reason": LENGTH}) for number in range(2)))
        assert [(await task).outputs[0].token_ids for task in waiting] == [[0], [1]]


@asynchronous
async def test_requests_fail_with_cause_when_no_engine_returns():
    async with attached() as setup:
        first = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave("killed")
        second = setup.client.generate(PROMPT, PARAMS)
        await setup.deliver(FakeEngine(setup, incarnation=1).joined_message())
        successor = FakeEngine(setup, incarnation=1)
        await successor.leave("no memory", returns=True)
        await FakeEngine(setup, incarnation=2).leave("no memory at all", returns=False)
        for stream in (first, second):
            with pytest.raises(EngineFailed, match=r"engine-0\.2 ended: no memory at all"):
                await stream.result()
        assert not setup.client.expects_engines
        with pytest.raises(Unavailable, match="no memory at all"):
            setup.client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineFailed, match="no memory at all"):
            await setup.client.wait_until_ready(5)


@asynchronous
async def test_wait_until_ready_waits_for_engine_that_is_tried_again():
    async with attached() as setup:
        await setup.engine.leave(returns=False)
        waiting = await start_task(setup.client.wait_until_ready(5))
        with pytest.raises(EngineFailed, match="SIGKILL"):
            await waiting
        await FakeEngine(setup, rank=1).leave("no port", returns=True)
        waiting = await start_task(setup.client.wait_until_ready(5))
        assert not waiting.done()
        await FakeEngine(setup, rank=1, incarnation=1).join()
        assert await waiting == INFO


@asynchronous
async def test_request_with_rank_waits_although_others_are_up():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        pinned = setup.client.generate(PROMPT, PARAMS, rank=0)
        await setup.engine.leave()
        later = setup.client.generate(PROMPT, PARAMS, rank=0)
        assert other.receive().request_ids == []
        successor = await FakeEngine(setup, incarnation=1).join()
        assert len(successor.receive().request_ids) == 2
        await successor.leave("broken", returns=False)
        for stream in (pinned, later):
            with pytest.raises(EngineFailed, match=r"engine-0\.1 ended: broken"):
                await stream.result()
        with pytest.raises(Unavailable, match=r"rank 0 is not served any more: engine-0\.1 ended: broken$"):
            setup.client.generate(PROMPT, PARAMS, rank=0)
        with pytest.raises(InvalidRequest, match=r"there is no data-parallel rank 2: the ranks .* are 1$") as raised:
            setup.client.generate(PROMPT, PARAMS, rank=2)
        assert raised.value.param == "X-data-parallel-rank"
        assert setup.client.num_in_flight == 0


@asynchronous
async def test_session_stays_until_its_engine_exits():
    async with attached() as setup:
        engines = [setup.engine, *[await FakeEngine(setup, rank=rank).join() for rank in range(1, 4)]]
        for _ in range(6):
            setup.client.generate(PROMPT, PARAMS, session="me")
        (home,) = [engine for engine in engines if engine.receive().request_ids]
        await home.leave()
        assert [
            len(engine.request_ids) for engine in engines if engine.receive().request_ids and engine is not home
        ] == [6]


@asynchronous
async def test_stop_with_cause_fails_all_requests_and_calls():
    async with attached() as setup:
        running = setup.client.generate(PROMPT, PARAMS)
        call = await start_task(setup.client.call_workers("weigh", timeout=None))
        await setup.deliver(Stop(1.0, "engine-0 was given up: no memory"))
        for work in (running.result(), call, setup.client.wait_until_ready(5)):
            with pytest.raises(EngineFailed, match=r"^engine-0 was given up: no memory$"):
                await work
        with pytest.raises(EngineFailed, match="given up"):
            setup.client.generate(PROMPT, PARAMS)
        with pytest.raises(EngineFailed, match="given up"):
            await setup.client.call_workers("weigh", timeout=None)
        await setup.engine.leave(returns=True)
        assert not setup.client.expects_engines
        assert setup.client.cause == "engine-0 was given up: no memory"


# Charged exits.


@asynchronous
async def test_request_beyond_max_restarts_fails_alone():
    async with attached(max_request_restarts=1) as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave("killed")
        successor = await FakeEngine(setup, incarnation=1).join()
        beside = setup.client.generate(PROMPT, PARAMS)
        assert successor.receive().requests[successor.request_ids[0]].is_suspect
        await successor.send((0, {"is_started": True}))
        await successor.leave("out of memory")
        with pytest.raises(EngineFailed) as raised:
            await stream.result()
        assert str(raised.value) == (
            "engine-0.1 ended: out of memory; 2 engines have ended with this request in flight, and "
            "`max_request_restarts` is 1"
        )
        last = await FakeEngine(setup, incarnation=2).join()
        await last.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await beside.result()).finished


@asynchronous
async def test_max_request_restarts_zero_exit_fails_running_requests():
    async with attached(max_request_restarts=0) as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        assert not setup.engine.receive().requests[setup.engine.request_ids[0]].is_suspect
        await setup.engine.leave("killed")
        with pytest.raises(EngineFailed, match=r"killed; 1 engine has ended .* `max_request_restarts` is 0"):
            await stream.result()
        setup.client.generate(PROMPT, PARAMS)  # waits for the successor


@pytest.mark.parametrize("num_others", [1, 5])
@pytest.mark.parametrize("poison_first", [True, False])
def test_poison_request_among_others_fails_alone(num_others, poison_first):
    async def scenario():
        async with fleet_of(1) as (setup, fleet):
            setup.client.observe_recovery(observer := Observer())

            def others(count):
                return [setup.client.generate(PROMPT, SamplingParams(seed=3)) for _ in range(count)]

            before = others(0 if poison_first else num_others)
            poison = setup.client.generate(Prompt(token_ids=[5, POISON, 7]), PARAMS)
            streams = before + others(num_others - len(before))
            num_deaths = 0
            while setup.client.num_in_flight:
                await fleet.engines[0].step()
                if fleet.engines[0].has_exited:
                    num_deaths += 1
                    await fleet.kill(0)
                    await fleet.join(0)
            with pytest.raises(EngineFailed, match="ended: killed 4; 4 engines have ended with this request"):
                await poison.result()
            for stream in streams:
                assert (await stream.result()).outputs[0].token_ids == [token_at(3, place) for place in range(16)]
            assert num_deaths == 4
            assert [event for event in observer.events if event[0] == "failed"] == [("failed", 1)]

    asyncio.run(asyncio.wait_for(scenario(), 20))


@asynchronous
async def test_suspect_that_was_not_started_is_not_charged():
    async with attached(max_request_restarts=2) as setup:
        started_first, started_later = (setup.client.generate(PROMPT, PARAMS) for _ in range(2))

        async def start_and_exit(incarnation, *chunks):
            """Return for each request that the engine received whether it was a suspect."""
            engine = await FakeEngine(setup, incarnation=incarnation).join()
            await engine.send(*chunks)
            await engine.leave(f"death {incarnation}")
            return [message.is_suspect for message in engine.requests.values()]

        await setup.engine.leave()
        begins = {"is_started": True}
        assert await start_and_exit(1, (0, begins), (1, begins)) == [False, False]
        assert await start_and_exit(2, (0, begins)) == [True, True]
        with pytest.raises(EngineFailed, match=r"engine-0\.2 ended: death 2; 3 engines"):
            await started_first.result()
        assert await start_and_exit(3) == [True]
        assert await start_and_exit(4) == [True]
        assert await start_and_exit(5, (0, begins)) == [True]
        with pytest.raises(EngineFailed, match=r"engine-0\.5 ended: death 5; 3 engines"):
            await started_later.result()


@asynchronous
async def test_request_queued_in_failing_engines_is_no_suspect():
    """A thousand requests may be queued behind the running ones; they must not run one at a time for that."""
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave()
        for incarnation in range(1, 12):
            engine = await FakeEngine(setup, incarnation=incarnation).join()
            (message,) = engine.receive().requests.values()
            assert (message.is_suspect, message.announce_start) == (False, True)
            await engine.leave()
        last = await FakeEngine(setup, incarnation=12).join()
        await last.send((0, {"is_started": True}))
        await last.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].token_ids == [9]


@asynchronous
async def test_request_with_token_from_every_engine_survives_many_exits():
    async with attached() as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(max_tokens=20))
        engine = setup.engine
        for incarnation in range(1, 16):
            await engine.send((0, {"token_ids": [incarnation]}))
            await engine.leave()
            engine = await FakeEngine(setup, incarnation=incarnation).join()
        await engine.send((0, {"token_ids": [99], "finish_reason": LENGTH}))
        assert (await stream.result()).outputs[0].token_ids == [*range(1, 16), 99]


# First starts.


@asynchronous
async def test_request_with_rank_waits_for_first_start_of_its_engine():
    async with attached(ranks=range(2)) as setup:
        pinned = setup.client.generate(PROMPT, PARAMS, rank=1)
        assert setup.engine.receive().request_ids == []
        await FakeEngine(setup, rank=1).leave("killed in its start")
        with pytest.raises(InvalidRequest, match="there is no data-parallel rank 2: the ranks of this deployment are"):
            setup.client.generate(PROMPT, PARAMS, rank=2)
        late = await FakeEngine(setup, rank=1, incarnation=1).join()
        await late.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        assert (await pinned.result()).outputs[0].token_ids == [9]


@asynchronous
async def test_request_waiting_for_first_start_times_out():
    async with attached(ranks=range(2)) as setup:
        pinned = setup.client.generate(PROMPT, PARAMS, rank=1, timeout=0.05)
        with pytest.raises(DeadlineExceeded, match="it was waiting for an engine"):
            await pinned.result()


@asynchronous
async def test_requests_wait_for_engine_that_starts_for_first_time():
    async with attached(ranks=range(2)) as setup:
        running = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave("no memory", returns=False)
        new = setup.client.generate(PROMPT, PARAMS)
        other = await FakeEngine(setup, rank=1).join()
        await other.send(*((number, {"token_ids": [9], "finish_reason": LENGTH}) for number in range(2)))
        for stream in (running, new):
            assert (await stream.result()).finished


# Limits.


@asynchronous
async def test_timeout_reports_progress_and_aborts():
    async with attached(request_timeout=1000.0) as setup:
        stream = setup.client.generate(PROMPT, SamplingParams(max_tokens=20), timeout=0.05)
        await setup.engine.send((0, {"token_ids": [9, 9]}))
        with pytest.raises(DeadlineExceeded) as raised:
            await stream.result()
        assert str(raised.value) == ("the request was given up after 0.05 s (`timeout`): it had 2 of at most 20 tokens")
        assert setup.engine.receive().aborted == setup.engine.request_ids
        assert setup.client.num_in_flight == 0
        setup.client.generate(PROMPT, PARAMS)
        for wrong in (0, -1, float("nan"), float("inf"), "5"):
            with pytest.raises(InvalidRequest, match="`timeout` must be a number of seconds above 0"):
                setup.client.generate(PROMPT, PARAMS, timeout=wrong)


@asynchronous
async def test_timeout_after_finish_does_nothing():
    async with attached() as setup:
        errors = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
        ended = setup.client.generate(PROMPT, PARAMS, timeout=0.02)
        await setup.engine.send((0, {"token_ids": [9], "finish_reason": LENGTH}))
        late = setup.client.generate(PROMPT, PARAMS, timeout=0.04)
        with pytest.raises(DeadlineExceeded):
            await late.result()
        assert (await ended.result()).outputs[0].finish_reason == "length"
        assert errors == []


@asynchronous
async def test_timeout_includes_wait_for_engine():
    async with attached(request_timeout=0.05) as setup:
        stream = setup.client.generate(PROMPT, PARAMS)
        await setup.engine.leave()
        with pytest.raises(DeadlineExceeded, match="0 of at most 16 tokens, and it was waiting for an engine"):
            await stream.result()
        successor = await FakeEngine(setup, incarnation=1).join()
        assert successor.receive().request_ids == []


@asynchronous
async def test_num_queued_seqs_counts_completions_until_first_token():
    async with attached() as setup:
        client = setup.client
        first = client.generate(PROMPT, SamplingParams(n=3))
        client.generate(PROMPT, PARAMS)
        assert client.num_queued_seqs == 4
        await setup.engine.send((1, {"token_ids": [9]}))
        assert client.num_queued_seqs == 1
        await setup.engine.leave()
        assert client.num_queued_seqs == 1
        first.abort()
        assert client.num_queued_seqs == 1
        await client.close()
        assert client.num_queued_seqs == 0


@asynchronous
async def test_start_when_send_fails_aborts_sent_messages():
    async with attached() as setup:
        sent = []

        def send(peer, message):
            if len(sent) == 2:
                sent.append(None)
                raise OverflowError("a number that no wire can carry")
            sent.append(message)

        setup.client._in_flight._send = send
        with pytest.raises(OverflowError):
            setup.client.generate(PROMPT, SamplingParams(n=4))
        names = [message.request_id for message in sent[:2]]
        assert isinstance(sent[-1], Abort) and set(names) <= set(sent[-1].request_ids)
        assert (setup.client.num_in_flight, setup.client.num_queued_seqs) == (0, 0)


# Engines that leave on purpose.


def test_planned_exits_are_not_charged_and_requests_move(caplog):
    async def scenario():
        async with fleet_of(2, max_request_restarts=0) as (setup, fleet):
            setup.client.observe_recovery(observer := Observer())
            params = SamplingParams(max_tokens=8, seed=1)
            streams = [setup.client.generate(PROMPT, params, request_id=name) for name in "ab"]
            for rank in (0, 1):
                for engine in fleet.engines.values():
                    await engine.step()
                await fleet.engines.pop(rank).leave("it is restarted on purpose", is_planned=True)
                await setup.deliver(ComputingEngine(setup, rank, 1).joined_message())
                fleet.engines[rank] = ComputingEngine(setup, rank, 1)
            assert all(not message.is_suspect for message in fleet.engines[0].receive().requests.values())
            await fleet.finish()
            outputs = [(await stream.result()).outputs[0].token_ids for stream in streams]
            assert outputs == [[token_at(1, place) for place in range(8)]] * 2
            assert [event[0] for event in observer.events if event != "next token"] == ["resumed", "resumed"]

    caplog.set_level(logging.INFO, logger="eagleray.client.in_flight")
    asyncio.run(asyncio.wait_for(scenario(), 10))
    leaving = [record for record in caplog.records if " as planned" in record.getMessage()]
    assert [record.levelname for record in leaving] == ["INFO"] * 2
    assert leaving[0].getMessage() == (
        "engine-0 has left as planned: it is restarted on purpose; requests moved to other engines: 1, queued: 0, "
        "failed: 0"
    )


@asynchronous
async def test_removed_rank_fails_requests_that_name_it_and_others_move():
    async with attached() as setup:
        other = await FakeEngine(setup, rank=1).join()
        setup.client.observe_recovery(observer := Observer())
        stays = setup.client.generate(PROMPT, PARAMS, rank=1)
        await other.leave("it was removed by scaling", returns=False, is_planned=True)
        with pytest.raises(Unavailable, match="engine-1 left: it was removed by scaling"):
            await stays.result()
        with pytest.raises(InvalidRequest, match="no data-parallel rank 1 any more"):
            setup.client.generate(PROMPT, PARAMS, rank=1)
        assert (observer.events, setup.client.ranks) == ([], [0])


@asynchronous
async def test_draining_engine_is_reported_when_its_last_request_has_ended():
    async with attached() as setup:
        engine, other = setup.engine, await FakeEngine(setup, rank=1).join()
        idle = EngineId("test", 7)
        await setup.deliver(Draining(idle))
        assert setup.drained == [idle]
        first = setup.client.generate(PROMPT, SamplingParams(n=2), rank=0)
        second = setup.client.generate(PROMPT, PARAMS, rank=0)
        call = await start_task(setup.client.call_workers("ping", timeout=5.0))
        await setup.deliver(Draining(engine.id))
        assert [setup.client.generate(PROMPT, PARAMS)._request.engine for _ in range(3)] == [other.id] * 3
        await engine.send((0, {"finish_reason": LENGTH}), (1, {"finish_reason": LENGTH}))
        await first.result()
        second.abort()
        assert setup.drained == [idle]
        for fake in (engine, other):
            (sent,) = fake.receive().calls
            await setup.deliver(WorkersReturned(call_id=sent.call_id, values=[]))
        await call
        assert setup.drained == [idle, engine.id]


# The observer.


@asynchronous
async def test_on_next_token_measures_from_first_unanswered_exit():
    async with attached() as setup:
        now, waits = 0.0, []
        setup.client._in_flight._clock = lambda: now
        setup.client.observe_recovery(observer := Observer())
        observer.on_next_token = waits.append
        setup.client.generate(PROMPT, PARAMS)
        engine = setup.engine
        for incarnation, sends_token in ((1, True), (2, False), (3, True)):
            await engine.leave()
            now += 2.0
            engine = await FakeEngine(setup, incarnation=incarnation).join()
            if sends_token:
                now += 1.0
                await engine.send((0, {"token_ids": [9]}))
                await engine.send((0, {"token_ids": [9]}))
        assert waits == [3.0, 5.0]


def test_observer_and_log_report_every_restart(caplog):
    async def scenario():
        async with attached(max_request_restarts=1) as setup:
            setup.client.observe_recovery(observer := Observer())
            moves = setup.client.generate(PROMPT, PARAMS)
            stays = setup.client.generate(PROMPT, PARAMS, rank=0)
            other = await FakeEngine(setup, rank=1).join()
            await setup.engine.send((0, {"token_ids": [1, 2, 3]}))
            await setup.engine.leave("killed")
            await other.send((0, {"token_ids": [4]}))
            await other.send((0, {"token_ids": [5]}))
            successor = await FakeEngine(setup, incarnation=1).join()
            await successor.send((0, {"is_started": True}))
            await successor.leave("killed again")
            with pytest.raises(EngineFailed, match="killed again"):
                await stays.result()
            moves.abort()
            assert observer.events == [
                ("resumed", 1, 3 + 3),
                "next token",
                ("resumed", 1, 3),
                ("failed", 1),
            ]

    caplog.set_level(logging.INFO, logger="eagleray.client.in_flight")
    asyncio.run(asyncio.wait_for(scenario(), 10))
    assert [record.getMessage() for record in caplog.records] == [
        "engine-0 has left: killed; requests sent to other engines: 1, queued: 1, failed: 0",
        "engine-0.1 has joined; requests sent from the queue: 1",
        "engine-0.1 has left: killed again; requests sent to other engines: 0, queued: 0, failed: 1",
    ]
