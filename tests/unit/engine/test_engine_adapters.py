"""Adapters of an engine: what it loads, keeps and frees, with a worker in memory."""

from __future__ import annotations

import math

import msgspec
import pytest
from engine_fakes import ENGINE, CountingGroup

from eagleray.config.build import build_config
from eagleray.engine.adapters import EngineAdapters
from eagleray.engine.control import EngineControl
from eagleray.engine.startup import start_engine
from eagleray.errors import CheckpointError, InvalidRequest
from eagleray.executor.executor import Executor
from eagleray.identity import ClientId, next_incarnation
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import Command, CommandDone, DropAdapter, InstanceState, SetState, StageAdapter
from eagleray.messages.failure import Failure
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import AdapterWritten, WriteAdapter

A = Adapter(name="a", number=1, path="/a", digest="d")
B = Adapter(name="b", number=2, path="/b", digest="d")
MISFIT = Failure(message="it does not fit", kind="CheckpointError", is_user_error=True)


class SmallEngine:
    """An engine with two slots for adapters (`max_loras` 1)."""

    def __init__(self, engine=ENGINE) -> None:
        self.group, self.replies = CountingGroup(), list[CommandDone]()
        config = build_config(enable_lora=True, max_loras=1)
        self.core = start_engine(config, Executor(self.group), deadline=math.inf).core
        self.control = EngineControl(engine, self.core, publish=lambda chunks: None, reply=self.replies.append)
        self.slots = self.core.scheduler.adapters

    def execute(self, *bodies) -> list[CommandDone]:
        for number, body in enumerate(bodies, len(self.replies) + 1):
            self.control.add(Command(number=number, body=body, timeout=10.0), 0.0)
        self.control.advance(0.0)
        return self.replies

    def add_request(self, name: str, number: int) -> None:
        self.core.scheduler.add(
            Generate(
                request_id=f"{name}{number}",
                client=ClientId("i", 0),
                prompt_token_ids=[1] * 5,
                sampling=Sampling(seed=0),
                stopping=Stopping(max_tokens=3),
                adapter=name,
                adapter_number=number,
            )
        )

    @property
    def written(self) -> list[str]:
        return [call.path for call in self.group.calls if isinstance(call, WriteAdapter)]


def with_adapters(*adapters: Adapter, **fields) -> SetState:
    return SetState(state=InstanceState(adapters=adapters, **fields))


def test_stage_adapter_loads_it_once_and_reports_the_digest():
    engine = SmallEngine()
    staged = msgspec.structs.replace(A, digest="")
    (done, _) = engine.execute(StageAdapter(staged), with_adapters(A))
    assert done.result == {"digest": "d"}
    assert engine.written == ["/a"]


def test_stage_adapter_that_does_not_fit_leaves_its_slot_free():
    engine = SmallEngine()
    engine.group.adapter_failures["/a"] = MISFIT
    (done,) = engine.execute(StageAdapter(A))
    assert done.failure == MISFIT
    assert 1 not in engine.slots


def test_drop_adapter_frees_its_slot():
    engine = SmallEngine()
    engine.execute(StageAdapter(A), DropAdapter(1), DropAdapter(7))
    assert 1 not in engine.slots


def test_state_without_an_adapter_frees_it_when_its_requests_have_ended():
    engine = SmallEngine()
    engine.execute(with_adapters(A))
    engine.add_request("a", 1)
    engine.execute(with_adapters())
    assert 1 in engine.slots
    while engine.core.scheduler.has_work:
        engine.core.step(lambda chunks: None)
    assert 1 not in engine.slots


def test_stage_adapter_waits_for_a_slot_until_requests_have_ended():
    engine = SmallEngine()
    for number in (1, 2):
        adapter = Adapter(name="a", number=number, path=f"/{number}")
        engine.execute(with_adapters(adapter))
        engine.add_request("a", number)
    third = Adapter(name="a", number=3, path="/3")
    assert len(engine.execute(StageAdapter(third))) == 2
    assert engine.control.tasks
    while engine.core.scheduler.has_work:
        engine.core.step(lambda chunks: None)
    # the second is still that of the instance
    engine.control.advance(0.0)
    assert engine.replies[-1].result == {"digest": "d"}
    assert engine.written == ["/1", "/2", "/3"]


def test_stage_adapter_in_a_pause_without_a_slot_is_refused():
    engine = SmallEngine()
    for number in (1, 2):
        engine.execute(with_adapters(Adapter(name="a", number=number, path=f"/{number}")))
        engine.add_request("a", number)
    engine.execute(with_adapters(Adapter(name="a", number=2, path="/2"), pause="keep"))
    *_, done = engine.execute(StageAdapter(Adapter(name="a", number=3, path="/3")))
    assert done.failure is not None and "call resume first" in done.failure.message


def test_an_engine_that_starts_loads_the_adapters_of_the_instance():
    engine = SmallEngine()
    engine.control.adopt(InstanceState(adapters=(A,)), timeout=5.0)
    assert 1 in engine.slots


def test_the_first_engine_of_a_rank_does_not_start_without_its_adapters():
    engine = SmallEngine()
    engine.group.adapter_failures["/a"] = MISFIT
    with pytest.raises(CheckpointError, match="adapter 'a': it does not fit"):
        engine.control.adopt(InstanceState(adapters=(A,)), timeout=5.0)


@pytest.mark.parametrize(("change", "message"), [("gone", "it does not fit"), ("other files", "has changed since")])
def test_a_successor_that_cannot_load_an_adapter_fails_its_requests_alone(change, message):
    engine = SmallEngine(next_incarnation(ENGINE))
    if change == "gone":
        engine.group.adapter_failures["/a"] = MISFIT
    else:
        engine.group.digests["/a"] = "other"
    engine.control.adopt(InstanceState(adapters=(A, B)), timeout=5.0)
    engine.add_request("b", 2)
    with pytest.raises(InvalidRequest, match=message):
        engine.add_request("a", 1)


def test_adapters_are_loaded_when_the_weights_are_awake():
    engine = SmallEngine(next_incarnation(ENGINE))
    engine.control.adopt(InstanceState(adapters=(A,), asleep=("weights",), sleep_level=1), timeout=5.0)
    assert engine.written == []
    engine.execute(with_adapters(A))
    assert engine.written == ["/a"]


def test_ranks_that_read_different_files_are_a_failure():
    engine = SmallEngine()
    digests = iter(["one", "two"])

    class TwoRanks:
        def call(self, call, kind, timeout):
            return [AdapterWritten(digest=next(digests)) for _ in range(2)]

    adapters = EngineAdapters(engine.core)
    engine.core.executor = TwoRanks()
    with pytest.raises(StopIteration) as end:
        next(adapters.load(msgspec.structs.replace(A, digest=""), 5.0))
    assert "has changed since" in end.value.value.message
