"""Commands of the supervisor to an engine, in the engine's own loop with workers in memory."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from engine_fakes import ENGINE, CountingGroup, ListInbox, ListOutbox
from hypothesis import given, settings
from hypothesis import strategies as st
from output_chunks import chunks_of

from eagleray.config.build import build_config
from eagleray.engine.loop import EngineLoop
from eagleray.engine.startup import start_engine
from eagleray.executor.executor import Executor
from eagleray.identity import SUPERVISOR, ClientId
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    CheckWeights,
    CloseWeightTransfer,
    Command,
    CommandBody,
    CommandDone,
    InstanceState,
    ReceiveWeights,
    ResetPrefixCache,
    SetState,
)
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import Stop
from eagleray.messages.membership import Joined
from eagleray.messages.outputs import Chunk, Chunks, EngineStats
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import SleepWorker, StepPlan, WakeWorker
from eagleray.messages.weight_transfer import ApplyUpdate, StartUpdate

CLIENT = ClientId("i", 0)
SERVING, KEEP = InstanceState(), InstanceState(pause="keep")
DEPTHS = pytest.mark.parametrize("executor", ["auto", "processes"])
"""One step in flight, and two."""


def generate(request_id: str, *, num_prompt: int = 5, max_tokens: int = 6) -> Generate:
    return Generate(
        request_id=request_id,
        client=CLIENT,
        prompt_token_ids=[1] * num_prompt,
        sampling=Sampling(seed=0),
        stopping=Stopping(max_tokens=max_tokens),
    )


class Run:
    """A run of an engine's loop.

    `at`: messages that arrive while a step, by its number, is computed, or when the engine has nothing to do before;
    `idle`: those that arrive one by one when the engine has nothing to do after these; then it stops. `has_staged`: the
    workers have received weights for every update.
    """

    def __init__(
        self,
        *messages: Any,
        at: dict[int, Sequence[Any]] | None = None,
        idle: Sequence[Any] = (),
        executor: str = "auto",
        state: InstanceState = SERVING,
        has_staged: bool = False,
        wake_failure: Failure | None = None,
        num_polls: int = 1,
        **options: Any,
    ) -> None:
        self.group, self.outbox = CountingGroup(), ListOutbox()
        self.group.wake_failure = wake_failure
        self.group.num_polls = num_polls
        inbox = ListInbox(Joined(CLIENT, "c"), *messages)
        self._coming = deque((step, message) for step, some in sorted((at or {}).items()) for message in some)
        self._idle = iter([*idle, Stop(0.0)])
        self.group.on_step = lambda step: inbox.messages.extend(self._pop_coming(step))
        inbox.on_empty = lambda: self._coming.popleft()[1] if self._coming else next(self._idle)
        config = build_config(executor=executor, **options)
        core = start_engine(config, Executor(self.group), deadline=math.inf).core
        self.group.has_staged = has_staged
        loop = EngineLoop(ENGINE, core, inbox, self.outbox)
        loop.adopt(state, timeout=1)
        loop.run()

    def _pop_coming(self, step: int) -> Iterator[Any]:
        while self._coming and self._coming[0][0] <= step:
            yield self._coming.popleft()[1]

    @property
    def applied(self) -> list[tuple[int, int]]:
        """Updates that were applied, with the number of steps sent before."""
        calls = self.group.calls
        return [
            (call.number, sum(isinstance(earlier, StepPlan) for earlier in calls[:index]))
            for index, call in enumerate(calls)
            if isinstance(call, ApplyUpdate) and self.group.has_staged
        ]

    @property
    def chunks(self) -> list[Chunk]:
        found = [message for peer, message in self.outbox.sent if peer == CLIENT and isinstance(message, Chunks)]
        return [chunk for message in found for chunk in chunks_of(message)]

    @property
    def replies(self) -> dict[int, CommandDone]:
        return {done.number: done for peer, done in self.outbox.sent if isinstance(done, CommandDone)}

    def tokens(self, request_id: str) -> list[int]:
        return [token for chunk in self.chunks if chunk.request_id == request_id for token in chunk.token_ids]

    def finish(self, request_id: str) -> str | None:
        return next((c.finish_reason for c in self.chunks if c.request_id == request_id and c.finish_reason), None)

    def calls(self, *kinds: type) -> list[Any]:
        return [call for call in self.group.calls if isinstance(call, kinds)]

    def num_steps_before(self, number: int) -> int:
        """Return how many steps were sent before the reply to the command of this number: their chunks precede it."""
        sent = list(itertools.takewhile(lambda it: it[1] != self.replies[number], self.outbox.sent))
        return sum(isinstance(message, Chunks) for _, message in sent)


def command(number: int, body: CommandBody | InstanceState, *, timeout: float = 60.0, **fields: Any) -> Command:
    if isinstance(body, InstanceState):
        body = SetState(state=body, **fields)
    return Command(number=number, body=body, timeout=timeout)


@DEPTHS
def test_pause_keep_64_requests_tokens_after_resume_equal_undisturbed(executor):
    requests = [generate(str(index), num_prompt=1 + index % 7, max_tokens=8) for index in range(64)]
    undisturbed = Run(*requests, executor=executor)
    run = Run(*requests, at={3: [command(1, KEEP)]}, idle=[command(2, SERVING)], executor=executor)
    for request in requests:
        name = request.request_id
        assert len(run.tokens(name)) == 8
        assert (run.tokens(name), run.finish(name)) == (undisturbed.tokens(name), "length")
    assert run.replies[1].result == {"num_kept": 64, "num_aborted": 0, "freed_bytes": 0, "update": 0}
    assert run.replies[2].failure is None
    assert len(run.calls(StepPlan)) == len(undisturbed.calls(StepPlan)), "requests are computed again"


@DEPTHS
def test_pause_keep_reply_comes_after_steps_in_flight_and_none_follows(executor):
    run = Run(generate("a", max_tokens=50), at={2: [command(1, KEEP)]}, idle=[generate("late")], executor=executor)
    assert run.num_steps_before(1) == len(run.calls(StepPlan)) == len(run.tokens("a")) < 6
    assert run.tokens("late") == [] and run.finish("late") is None


def test_pause_requests_that_come_wait_and_load_is_reported():
    run = Run(command(1, KEEP), generate("a"), idle=[generate("b"), command(2, SERVING)])
    assert run.tokens("a") == run.tokens("b") == [5, 6, 7, 8, 9, 10]
    assert run.replies[1].result["num_kept"] == 1
    stats = [message for _, message in run.outbox.sent if isinstance(message, EngineStats)]
    assert max(one.num_waiting for one in stats) == 1


@DEPTHS
def test_pause_wait_reply_comes_when_running_requests_have_ended(executor):
    run = Run(
        generate("a", max_tokens=8),
        at={2: [command(1, InstanceState(pause="wait")), generate("late")]},
        idle=[command(2, SERVING)],
        executor=executor,
    )
    assert run.num_steps_before(1) == 8
    assert run.replies[1].result["num_kept"] == 1
    assert (run.finish("a"), run.tokens("late")) == ("length", [5, 6, 7, 8, 9, 10])


def test_pause_wait_resume_ends_the_wait():
    run = Run(
        generate("a", max_tokens=20),
        at={2: [command(1, InstanceState(pause="wait")), generate("late")], 5: [command(2, SERVING)]},
    )
    assert run.num_steps_before(1) == run.num_steps_before(2) == 6
    assert (len(run.tokens("a")), len(run.tokens("late"))) == (20, 6)


def test_pause_wait_deadline_names_what_it_waits_for():
    run = Run(generate("a", max_tokens=20), at={2: [command(1, InstanceState(pause="wait"), timeout=0)]})
    failure = run.replies[1].failure
    assert failure is not None and failure.kind == "DeadlineExceeded"
    assert failure.message == "engine-0 has not executed SetState within 0 s: it waits for 1 running requests"


def test_pause_wait_repeated_waits_for_the_same_requests():
    """The first call may have reached its time limit: the pause stays, and the second one waits on."""
    wait = InstanceState(pause="wait")
    run = Run(
        generate("a", max_tokens=20),
        at={2: [command(1, wait), generate("late")], 5: [command(2, wait)]},
        idle=[command(3, SERVING)],
    )
    assert run.num_steps_before(2) == 20 and run.finish("a") == "length"
    assert run.replies[2].result["num_kept"] == 1 and len(run.tokens("late")) == 6


def test_pause_wait_without_weights_steps_nothing():
    run = Run(
        generate("a", max_tokens=20),
        at={2: [command(1, InstanceState(asleep=("weights",), sleep_level=2))]},
        idle=[command(2, SERVING), command(3, InstanceState(pause="wait"))],
    )
    num_steps = run.num_steps_before(1)
    assert run.replies[3].result == {"num_kept": 1, "num_aborted": 0, "freed_bytes": 0, "update": None}
    assert len(run.tokens("a")) == num_steps < 20


def test_update_deadline_while_it_waits_is_applied_by_the_next_state():
    update = InstanceState(pause="wait", update=1, weight_version="one")
    run = Run(
        generate("a", max_tokens=9),
        at={2: [command(1, update, timeout=0)], 5: [command(2, msgspec.structs.replace(update, pause=None))]},
        has_staged=True,
    )
    assert run.replies[1].failure is not None and run.applied == [(1, 6)]
    assert run.chunks[6].weight_version == "one" and len(run.tokens("a")) == 9


def test_pause_wait_after_keep_kept_requests_finish():
    run = Run(generate("a", max_tokens=8), at={2: [command(1, KEEP)]}, idle=[command(2, InstanceState(pause="wait"))])
    assert len(run.tokens("a")) == 8 and run.replies[2].result["num_kept"] == 0


@DEPTHS
def test_pause_abort_running_and_waiting_deliver_what_there_is(executor):
    run = Run(
        *(generate(name, max_tokens=50) for name in "abc"),
        at={2: [command(1, InstanceState(pause="abort"), abort_running=True, clear_cache=True)]},
        idle=[generate("late"), command(2, SERVING)],
        executor=executor,
        max_num_seqs=2,
    )
    assert [run.finish(name) for name in "abc"] == ["abort"] * 3
    assert run.tokens("a") == [5, 6, 7] and run.tokens("c") == []
    assert run.replies[1].result["num_aborted"] == 3
    assert run.finish("late") == "length"


def test_sleep_of_the_cache_kept_requests_are_computed_again():
    asleep = InstanceState(asleep=("kv_cache",), sleep_level=1)
    run = Run(generate("a", max_tokens=9), at={3: [command(1, asleep)]}, idle=[command(2, SERVING)])
    assert run.tokens("a") == [5, 6, 7, 8, 9, 10, 11, 12, 13]
    assert run.replies[1].result == {"num_kept": 1, "num_aborted": 0, "freed_bytes": 1000, "update": 0}
    assert run.calls(SleepWorker, WakeWorker) == [
        SleepWorker(tags=("kv_cache",), level=1),
        WakeWorker(tags=("kv_cache",)),
    ]
    starts = [start for plan in run.calls(StepPlan) for start in plan.new_rows]
    assert [(len(start.token_ids), start.num_computed_tokens) for start in starts] == [(5, 0), (9, 0)]


def test_sleep_goes_deeper_and_wakes_in_parts():
    states = [
        InstanceState(asleep=("scheduling",), sleep_level=0),
        InstanceState(asleep=("scheduling", "kv_cache"), sleep_level=1),
        InstanceState(asleep=("scheduling", "kv_cache", "weights"), sleep_level=1),
        InstanceState(asleep=("weights",), sleep_level=1),
        SERVING,
    ]
    run = Run(generate("a"), idle=[command(number, state) for number, state in enumerate(states)])
    assert run.calls(SleepWorker, WakeWorker) == [
        SleepWorker(tags=("kv_cache",), level=1),
        SleepWorker(tags=("kv_cache", "weights"), level=1),
        WakeWorker(tags=("kv_cache",)),
        WakeWorker(tags=("weights",)),
    ]
    assert all(done.failure is None for done in run.replies.values())


def test_wake_up_without_memory_stays_asleep():
    asleep = InstanceState(asleep=("weights", "kv_cache"), sleep_level=1)
    failure = Failure(kind="ConfigError", message="too little memory", is_user_error=True)
    run = Run(command(1, asleep), generate("a"), idle=[command(2, SERVING)], wake_failure=failure)
    assert run.replies[2].failure == failure and run.tokens("a") == []
    assert run.calls(SleepWorker) == [SleepWorker(tags=("weights", "kv_cache"), level=1)] * 2


def test_sleep_that_drops_weights_requests_wait_for_an_update():
    run = Run(
        command(1, InstanceState(asleep=("weights",), sleep_level=2)),
        command(2, SERVING),
        generate("a"),
        idle=[command(3, InstanceState(update=1, weight_version="new"))],
        has_staged=True,
    )
    assert [run.replies[number].result["update"] for number in (1, 2, 3)] == [None, None, 1]
    assert run.applied == [(1, 0)] and run.tokens("a") == [5, 6, 7, 8, 9, 10]
    assert run.chunks[0].weight_version == "new"


@DEPTHS
def test_update_is_applied_between_steps_and_tokens_are_tagged(executor):
    """No step is in flight when the workers apply it, and each token has the version that computed it."""
    update = InstanceState(update=1, weight_version="one")
    run = Run(generate("a", max_tokens=9), at={3: [command(1, update)]}, executor=executor, has_staged=True)
    ((number, num_steps),) = run.applied
    versions = [chunk.weight_version for chunk in run.chunks]
    assert number == 1 and versions == [None] * num_steps + ["one"] + [None] * (8 - num_steps)
    assert run.num_steps_before(1) == num_steps and run.replies[1].result["update"] == 1
    assert max(stats.update for _, stats in run.outbox.sent if isinstance(stats, EngineStats)) == 1


def test_update_without_staged_weights_keeps_weights_and_version():
    run = Run(generate("a"), at={2: [command(1, InstanceState(update=1, weight_version="one"))]})
    assert run.replies[1].result["update"] == 0
    assert {chunk.weight_version for chunk in run.chunks} == {None} and len(run.tokens("a")) == 6


def test_update_open_does_not_stop_steps_unless_in_place():
    staged, in_place = InstanceState(open_update=1), InstanceState(open_update=1, is_in_place=True)
    assert len(Run(command(1, staged), generate("a")).tokens("a")) == 6
    run = Run(command(1, in_place), generate("a"))
    assert run.tokens("a") == [] and run.replies[1].failure is None


def test_new_name_of_the_weights_tags_later_tokens_without_a_stop():
    run = Run(generate("a", max_tokens=4), at={1: [command(1, InstanceState(weight_version="blue"))]})
    assert [chunk.weight_version for chunk in run.chunks] == [None, None, "blue", None]


@pytest.mark.parametrize("resets_running", [False, True])
def test_reset_prefix_cache_running_request_is_reset_or_refuses(resets_running):
    body = ResetPrefixCache(reset_running_requests=resets_running)
    run = Run(generate("a", max_tokens=9), at={3: [command(1, body)]}, idle=[command(2, ResetPrefixCache())])
    assert run.replies[1].result == {"success": resets_running}
    assert run.replies[2].result == {"success": True}
    assert run.tokens("a") == [5, 6, 7, 8, 9, 10, 11, 12, 13]


def test_reset_prefix_cache_deadline_in_a_step_requests_go_on():
    body = ResetPrefixCache(reset_running_requests=True)
    run = Run(generate("a"), at={2: [command(1, body, timeout=0.0)]}, executor="processes")
    assert run.replies[1].failure is not None
    assert run.tokens("a") == [5, 6, 7, 8, 9, 10]


def test_reset_prefix_cache_after_the_last_request_waits_for_the_step_in_flight():
    """The step after the last token of a request was planned before that token was known, and has its blocks."""
    stop = msgspec.structs.replace(generate("a"), stopping=Stopping(max_tokens=50, stop_token_ids=(8,)))
    run = Run(stop, at={4: [command(1, ResetPrefixCache())]}, executor="processes")
    assert run.finish("a") == "stop" and run.num_steps_before(1) == 4 < len(run.calls(StepPlan))
    assert run.replies[1].result == {"success": True}


def test_engine_attached_during_pause_or_sleep_starts_in_it():
    paused = Run(generate("a"), state=KEEP, idle=[command(1, SERVING)])
    assert paused.tokens("a") == [5, 6, 7, 8, 9, 10]
    assert Run(generate("a"), state=InstanceState(pause="wait")).tokens("a") == []
    asleep = Run(generate("a"), state=InstanceState(asleep=("kv_cache", "weights"), sleep_level=1))
    assert asleep.calls(SleepWorker) == [SleepWorker(tags=("kv_cache", "weights"), level=1)]
    assert asleep.tokens("a") == []


def test_command_that_engines_do_not_execute_is_refused():
    run = Run(command(1, AbortRequests()))
    failure = run.replies[1].failure
    assert failure is not None and "does not execute AbortRequests" in failure.message


UPDATING = InstanceState(open_update=1)
RECEIVE = ReceiveWeights(update_info=b"")


@pytest.fixture
def polls_always(monkeypatch):
    monkeypatch.setattr("eagleray.engine.weight_update.TRANSFER_POLL_SECONDS", 0)


@pytest.mark.usefixtures("polls_always")
@DEPTHS
def test_update_staged_steps_go_on_while_tensors_come(executor):
    messages = [
        command(1, UPDATING),
        command(2, RECEIVE),
        command(3, CheckWeights(require_complete=False)),
        command(4, InstanceState(update=1, weight_version="v1")),
    ]
    run = Run(generate("a", max_tokens=40), at={2: messages}, executor=executor, has_staged=True, num_polls=10)
    assert run.calls(StartUpdate) == [StartUpdate(number=1, is_in_place=False)]
    assert run.replies[2].result == {"num_tensors": 3, "num_bytes": 30}
    assert run.replies[3].result == {"missing": ["up"], "num_missing": 1}
    assert run.replies[4].result["update"] == 1
    assert run.num_steps_before(2) - run.num_steps_before(1) >= 5, "one step or more for each two polls"
    assert len(run.tokens("a")) == 40


@pytest.mark.usefixtures("polls_always")
@pytest.mark.parametrize("ends_by", [AbortWeightUpdate(), CloseWeightTransfer()])
def test_receive_is_broken_off_by_a_later_command(ends_by):
    run = Run(
        generate("a", max_tokens=40),
        at={2: [command(1, UPDATING), command(2, RECEIVE)], 6: [command(3, ends_by)]},
        num_polls=10_000,
    )
    failure = run.replies[2].failure
    assert failure is not None and failure.kind == "TransferBroken"
    assert run.replies[3].failure is None
    assert len(run.tokens("a")) == 40


@pytest.mark.usefixtures("polls_always")
def test_update_in_place_broken_off_leaves_no_weights_until_the_next_one():
    updating = InstanceState(open_update=1, is_in_place=True)
    torn = Run(
        generate("a", max_tokens=8),
        at={2: [command(1, updating), command(2, RECEIVE), command(3, AbortWeightUpdate()), command(4, SERVING)]},
    )
    assert torn.replies[4].result["update"] is None
    assert len(torn.tokens("a")) < 8, "no step is taken with a mixture of weights"
    mended = Run(
        generate("a", max_tokens=8),
        at={2: [command(1, updating), command(2, RECEIVE), command(3, AbortWeightUpdate())]},
        idle=[
            command(4, updating),
            command(5, RECEIVE),
            command(6, InstanceState(update=1)),
        ],
        has_staged=True,
    )
    assert mended.replies[6].result["update"] == 1
    assert len(mended.tokens("a")) == 8


def test_commands_are_executed_in_order():
    run = Run(
        generate("a", max_tokens=20),
        at={2: [command(1, InstanceState(pause="wait")), command(2, ResetPrefixCache())]},
    )
    assert [done.number for _, done in run.outbox.sent if isinstance(done, CommandDone)] == [1, 2]
    assert run.replies[2].result == {"success": True} and len(run.tokens("a")) == 20
    assert all(peer == SUPERVISOR for peer, done in run.outbox.sent if isinstance(done, CommandDone))
    assert msgspec.structs.asdict(run.replies[1])["member"] == ENGINE


STATES = st.builds(
    InstanceState,
    pause=st.sampled_from([None, None, "keep", "wait"]),
    asleep=st.sampled_from([(), (), ("kv_cache",), ("scheduling",), ("weights", "kv_cache")]),
    sleep_level=st.just(1),
    is_held=st.sampled_from([False, False, True]),
    weight_version=st.sampled_from(["default", "blue"]),
)


@st.composite
def scripts(draw: st.DrawFn) -> list[CommandBody]:
    """Draw commands as a supervisor may send them: the number of the update only grows."""
    bodies: list[CommandBody] = []
    update = 0
    for _ in range(draw(st.integers(1, 8))):
        if draw(st.integers(0, 4)) == 0:
            bodies.append(ResetPrefixCache(reset_running_requests=draw(st.booleans())))
            continue
        update += draw(st.sampled_from([0, 0, 1]))
        state = msgspec.structs.replace(draw(STATES), update=update)
        bodies.append(SetState(state=state, clear_cache=draw(st.booleans())))
    serving = InstanceState(update=update, weight_version="blue")
    return [*bodies, SetState(state=serving)]


@settings(deadline=None, max_examples=150)
@given(script=scripts(), data=st.data(), executor=st.sampled_from(["auto", "processes"]))
def test_commands_any_sequence_requests_get_their_tokens_and_commands_their_replies(script, data, executor):
    """Commands come at any steps, or when the engine is idle; the last state lets it serve again."""
    steps = st.lists(st.integers(0, 12), min_size=len(script), max_size=len(script))
    at: dict[int, list[Any]] = {}
    for number, step in enumerate(sorted(data.draw(steps))):
        at.setdefault(step, []).append(command(number, script[number]))
    requests = [generate(str(index), num_prompt=1 + index, max_tokens=3 + index % 5) for index in range(6)]
    run = Run(*requests, at=at, executor=executor, has_staged=True, max_num_seqs=4)
    for index, request in enumerate(requests):
        assert run.tokens(request.request_id) == list(range(1 + index, 4 + index + index % 5))
    replies = [done for _, done in run.outbox.sent if isinstance(done, CommandDone)]
    assert [(done.number, done.failure) for done in replies] == [(number, None) for number in range(len(script))]
    last = script[-1]
    assert isinstance(last, SetState)
    assert [number for number, _ in run.applied] == list(range(1, last.state.update + 1))
