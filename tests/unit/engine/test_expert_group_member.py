"""Engine loop of a member of an expert group: the messages it sends, and when it steps."""

from __future__ import annotations

import math
from typing import Any

import pytest
from engine_fakes import CountingGroup, ListInbox, ListOutbox
from output_chunks import chunks_of

from eagleray.config.build import build_config
from eagleray.engine.expert_group_member import ExpertGroupMember
from eagleray.engine.loop import EngineLoop
from eagleray.engine.startup import start_engine
from eagleray.errors import DeadlineExceeded
from eagleray.executor.executor import Executor
from eagleray.identity import SUPERVISOR, ClientId, EngineId, next_incarnation
from eagleray.messages.control import Command, CommandDone, InstanceState, SetState
from eagleray.messages.lifecycle import (
    EngineStarted,
    ExpertsBroken,
    ExpertsFormed,
    ExpertsJoined,
    ExpertsOpened,
    OpenExperts,
    Stop,
)
from eagleray.messages.membership import Joined
from eagleray.messages.outputs import Chunks
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import JoinGroup, OpenGroup, StepPlan
from eagleray.messages.waves import WaveStarted
from eagleray.messages.workers import EngineOpened, GroupOpened

CLIENT = ClientId("i", 0)
HERE, OTHER = EngineId("i", 0), EngineId("i", 1)
CLIENT_JOINED = Joined(CLIENT, "c")


def opened(rank: int) -> EngineOpened:
    return EngineOpened(rank=rank, topology=CountingGroup.topology, opened=[GroupOpened()])


def formed(epoch: int, other: EngineId = OTHER) -> ExpertsFormed:
    engines = [Joined(HERE, "here"), Joined(other, f"address of {other.label}")]
    return ExpertsFormed(epoch, engines, [opened(0), opened(1)])


FORMED = (OpenExperts(1, [0, 1], [0, 1]), formed(1), CLIENT_JOINED)


def generate(request_id: str, *, max_tokens: int = 3) -> Generate:
    return Generate(
        request_id=request_id,
        client=CLIENT,
        prompt_token_ids=[1] * 5,
        sampling=Sampling(seed=0),
        stopping=Stopping(max_tokens=max_tokens),
    )


def run(
    *messages: Any,
    later: Any = (),
    at: dict[int, list[Any]] | None = None,
    group: CountingGroup | None = None,
    outbox: ListOutbox | None = None,
    missing_seconds: float = 100.0,
) -> ListOutbox:
    """Run a loop that receives these messages, the `later` ones once it has no step to take, and then `Stop`. Those of
    `at` come while a step, by its number, is computed.

    A message None stands for a poll without a message.
    """
    group, outbox = group or CountingGroup(top_k=2), outbox or ListOutbox()
    config = build_config(enable_expert_parallel=True, data_parallel_size=2, enable_prefix_caching=False)
    started = start_engine(config, Executor(group), deadline=math.inf)
    assert started.core.waves is not None
    group_member = ExpertGroupMember(
        EngineStarted(HERE, started.info),
        started.core,
        started.core.waves,
        outbox,
        leave_seconds=1.0,
        join_seconds=1.0,
        missing_seconds=missing_seconds,
    )
    inbox, left = ListInbox(*messages), iter([*later, Stop(0.0)])
    inbox.on_empty = lambda: next(left)
    group.on_step = lambda step: inbox.messages.extend((at or {}).get(step, ()))
    EngineLoop(HERE, started.core, inbox, outbox, stepper=group_member).run()
    return outbox


def set_state(number: int, **fields: Any) -> Command:
    return Command(number=number, body=SetState(state=InstanceState(**fields)), timeout=60.0)


def said(outbox: ListOutbox, peer: Any) -> list[Any]:
    return [message for who, message in outbox.sent if who == peer]


def tokens(outbox: ListOutbox) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for message in said(outbox, CLIENT):
        if isinstance(message, Chunks):
            for chunk in chunks_of(message):
                found.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return found


def steps(group: CountingGroup) -> list[StepPlan]:
    return [call for call in group.calls if isinstance(call, StepPlan)]


def test_group_member_first_group_formed_reports_start():
    group = CountingGroup(top_k=2)
    outbox = run(OpenExperts(1, [0, 1], [0, 1]), later=[None, formed(1)], group=group)
    here, joined, started = said(outbox, SUPERVISOR)
    where = EngineOpened(rank=0, topology=CountingGroup.topology, opened=[GroupOpened(store="store of epoch 1")])
    assert here == ExpertsOpened(HERE, 1, where)
    assert joined == ExpertsJoined(HERE, 1)
    assert isinstance(started, EngineStarted)
    assert JoinGroup("expert", 1, formed(1).members) in group.calls
    assert outbox.peers[OTHER] == "address of engine-1"


def test_group_member_before_group_requests_wait_and_can_be_aborted():
    outbox = run(
        CLIENT_JOINED,
        generate("a"),
        generate("b"),
        later=[OpenExperts(1, [0, 1], [1]), Abort(CLIENT, ["a"]), formed(1)],
    )
    assert tokens(outbox) == {"a": [], "b": [5, 6, 7]}


def test_group_member_with_work_starts_a_wave():
    outbox = run(*FORMED, generate("a"), later=[generate("b")])
    assert tokens(outbox) == {"a": [5, 6, 7], "b": [5, 6, 7]}
    assert said(outbox, OTHER) == [WaveStarted(HERE, 1, 1), WaveStarted(HERE, 1, 2)]


def test_group_member_idle_steps_in_a_wave_of_others():
    group = CountingGroup(top_k=2)
    group.works_for_others = lambda plan: plan.step < 3
    outbox = run(*FORMED, WaveStarted(OTHER, 1, 1), group=group)
    assert said(outbox, OTHER) == []
    assert [(plan.step, plan.is_idle, plan.rows) for plan in steps(group)] == [(n, True, []) for n in range(4)]


def test_group_member_request_during_wave_is_computed():
    group = CountingGroup(top_k=2)
    group.works_for_others = lambda plan: plan.step < 3
    outbox = run(*FORMED, WaveStarted(OTHER, 1, 1), generate("a"), group=group)
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert said(outbox, OTHER) == []


def test_group_member_broken_step_keeps_all_requests():
    group = CountingGroup(top_k=2)
    group.breaks_at_step = 1
    again = [None, OpenExperts(2, [0, 1], [1]), None, formed(2, next_incarnation(OTHER))]
    outbox = run(*FORMED, generate("a"), generate("b"), later=again, group=group)
    assert tokens(outbox) == {"a": [5, 6, 7], "b": [5, 6, 7]}
    assert [one.epoch for one in said(outbox, SUPERVISOR) if isinstance(one, ExpertsOpened)] == [1, 2]
    assert ExpertsBroken(HERE, 1) in said(outbox, SUPERVISOR)
    assert sum(isinstance(one, EngineStarted) for one in said(outbox, SUPERVISOR)) == 1
    assert said(outbox, OTHER) == [WaveStarted(HERE, 1, 1)]
    assert said(outbox, next_incarnation(OTHER)) == [WaveStarted(HERE, 2, 1)]
    assert OTHER not in outbox.peers


def test_group_member_idle_engine_opens_next_epoch_on_message():
    group = CountingGroup(top_k=2)
    outbox = run(
        *FORMED,
        later=[OpenExperts(2, [0, 1], [0, 1]), generate("a"), OpenExperts(2, [0, 1], [1]), formed(2)],
        group=group,
    )
    assert tokens(outbox) == {"a": [5, 6, 7]}
    assert [call.epoch for call in group.calls if isinstance(call, OpenGroup) and call.name == "expert"] == [1, 2]


def test_group_member_message_of_earlier_epoch_is_ignored():
    group = CountingGroup(top_k=2)
    outbox = run(
        OpenExperts(1, [0, 1], [1]),
        OpenExperts(3, [0, 1], [1]),
        OpenExperts(2, [0, 1], [1]),
        formed(1),
        formed(2),
        group=group,
    )
    assert not any(isinstance(call, JoinGroup) and call.name == "expert" for call in group.calls)
    assert [message.epoch for message in said(outbox, SUPERVISOR)] == [1, 3]


def test_group_member_exit_during_join_waits_for_next_epoch():
    group = CountingGroup(top_k=2)
    group.broken_epochs = [1]
    again = [None, OpenExperts(2, [0, 1], [1]), formed(2, next_incarnation(OTHER))]
    outbox = run(*FORMED, generate("a"), later=again, group=group)
    assert tokens(outbox) == {"a": [5, 6, 7]}
    reports = [one for one in said(outbox, SUPERVISOR) if not isinstance(one, ExpertsOpened | EngineStarted)]
    assert reports == [ExpertsBroken(HERE, 1), ExpertsJoined(HERE, 2)]


def test_group_member_other_ranks_joins_them():
    """An added engine joins the running wave's engines; later this one is alone."""
    group, added = CountingGroup(top_k=2), EngineId("i", 4)
    larger = ExpertsFormed(2, [*formed(2).engines, Joined(added, "added")], [opened(rank) for rank in (0, 1, 4)], [1])
    alone = ExpertsFormed(3, [Joined(HERE, "here")], [opened(0)])
    at = {1: [OpenExperts(2, [0, 1, 4], [1, 4])], 2: [larger], 4: [OpenExperts(3, [0], [0]), alone]}
    outbox = run(*FORMED, generate("a", max_tokens=8), at=at, later=[larger], group=group)
    assert tokens(outbox) == {"a": [5, 6, 7, 8, 9, 10, 11, 12]}
    calls = [call for call in group.calls if isinstance(call, OpenGroup | JoinGroup) and call.name == "expert"]
    assert calls[2:] == [
        OpenGroup("expert", 2, [0, 1, 4]),
        JoinGroup("expert", 2, larger.members, [1]),
        OpenGroup("expert", 3, [0]),
        JoinGroup("expert", 3, alone.members),
    ]
    assert said(outbox, added) == [WaveStarted(HERE, 2, 1)]
    assert outbox.peers.keys().isdisjoint([OTHER, added])


def test_group_member_before_first_group_waits_without_limit():
    assert said(run(None, None, missing_seconds=-1.0), SUPERVISOR) == []


def test_group_member_missing_engine_timeout_names_it():
    with pytest.raises(
        DeadlineExceeded,
        match=r"engine-0 waited .* for its expert group \(epoch 1\): engine 1 is missing, no update for",
    ):
        run(OpenExperts(1, [0, 1], [1]), later=[None] * 3, missing_seconds=-1.0)


def test_group_member_paused_starts_no_wave_but_idles_in_those_of_others():
    """Engines are paused one by one: one that would not idle would block the others."""
    group = CountingGroup(top_k=2)
    group.works_for_others = lambda plan: plan.step == 0
    wave = WaveStarted(OTHER, 1, 1)
    outbox = run(*FORMED, set_state(1, pause="keep"), generate("a"), later=[wave, set_state(2)], group=group)
    assert [plan.is_idle for plan in steps(group)][:2] == [True, True]
    assert said(outbox, OTHER) == [WaveStarted(HERE, 1, 2)]
    assert tokens(outbox) == {"a": [5, 6, 7]}


def test_group_member_pause_is_reached_when_the_wave_is_over():
    """The reply follows the last step of the wave, which the other engine keeps busy for two more steps."""
    group, steps_at_reply = CountingGroup(top_k=2), []
    group.works_for_others = lambda plan: plan.step < 4
    outbox = ListOutbox()
    outbox.on_send = lambda message: isinstance(message, CommandDone) and steps_at_reply.append(len(steps(group)))
    pause = set_state(1, pause="keep")
    run(*FORMED, generate("a", max_tokens=50), group=group, at={1: [pause]}, outbox=outbox)
    assert [plan.is_idle for plan in steps(group)] == [False, False, True, True, True]
    assert steps_at_reply == [5] and tokens(outbox) == {"a": [5, 6]}


def test_group_member_memory_changes_only_while_it_is_held():
    asleep = {"asleep": ("weights",), "sleep_level": 1}
    outbox = run(*FORMED, set_state(1, **asleep), set_state(2, is_held=True), set_state(3, **asleep))
    replies = [one for one in said(outbox, SUPERVISOR) if isinstance(one, CommandDone)]
    assert [one.failure is None for one in replies] == [False, True, True]
    assert "all engines must be held before" in replies[0].failure.message
