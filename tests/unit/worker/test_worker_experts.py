"""Workers of two engines that share experts: they step together, and one survives the exit of the other."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from fake_device import FakeDevice, use_fake_device
from harness import LocalEngine, random_prompt
from msgspec.structs import replace
from random_grammars import random_grammar, worker_grammars
from ranks import together, topology

from eagleray.config.build import build_config
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.failure import Ended
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import (
    AllocateCache,
    Call,
    CallDone,
    GroupJoined,
    JoinGroup,
    LoadModel,
    ModelLoaded,
    NewRow,
    OpenGroup,
    ReadExpertLoad,
    StepBroken,
    StepPlan,
    StepResult,
    WorkerExpertLoad,
)
from eagleray.messages.workers import EngineOpened, GroupOpened
from eagleray.worker.worker import Worker

PROMPT = random_prompt(0, 20, 384)
NUM_TOKENS = 6
"""Number of generated tokens."""
NUM_ROWS, BLOCK_SIZE = 4, 16
WHERE = topology()


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3_moe", tokenizer=False)


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Return the tokens of an engine that has all experts."""
    with LocalEngine(checkpoint, block_size=BLOCK_SIZE, num_kv_blocks=64) as engine:
        engine.add("only", PROMPT, max_tokens=NUM_TOKENS)
        return engine.run()["only"].token_ids


class Engine:
    """An engine with one worker."""

    def __init__(self, checkpoint, rank: int, incarnation: int = 0, **options) -> None:
        parallel = {"data_parallel_size": 2, "enable_expert_parallel": True, "expert_dispatch": "all-to-all"}
        config = build_config(
            model=str(checkpoint), num_threads=1, block_size=BLOCK_SIZE, max_num_seqs=NUM_ROWS, **parallel | options
        )
        self.rank = rank
        self.worker = Worker(WorkerId(EngineId("test", rank, incarnation)), 0, config, WHERE)
        self._num_calls = self._num_steps = 0
        self._used_rows: list[int] = []

    def call(self, body):
        self._num_calls += 1
        [reply] = self.worker.handle(Call(self._num_calls, body))
        assert not isinstance(reply.body, Ended), reply.body.cause
        return reply.body

    def start(self) -> None:
        opened = self.call(OpenGroup("engine"))
        assert isinstance(opened, GroupOpened)
        assert isinstance(
            self.call(JoinGroup("engine", 0, [EngineOpened(rank=0, topology=WHERE, opened=[opened])])), CallDone
        )
        loaded = self.call(LoadModel())
        assert isinstance(loaded, ModelLoaded)
        assert (loaded.num_moe_layers, loaded.num_experts, loaded.top_k) == (3, 8, 3)
        assert len(loaded.layers_with_experts) == 3
        self.call(AllocateCache(8, 64))

    def open(self, epoch: int) -> EngineOpened:
        opened = self.call(OpenGroup("expert", epoch))
        assert isinstance(opened, GroupOpened)
        return EngineOpened(rank=self.rank, topology=WHERE, opened=[opened])

    def join(self, epoch: int, members: list[EngineOpened]) -> None:
        assert isinstance(self.call(JoinGroup("expert", epoch, members)), GroupJoined)

    def step(self, **fields) -> StepResult | StepBroken:
        self._num_steps += 1
        defaults = {"freed_rows": [], "new_rows": [], "new_blocks": [], "rows": [], "num_tokens": []}
        return self.call(StepPlan(step=self._num_steps, **defaults | fields))

    def generate(self, num_tokens: int) -> list[int]:
        """Return the first tokens behind the prompt, one for each step."""
        sampling = Sampling(seed=0, temperature=0.0)
        start = NewRow(
            row=0,
            request_id="only",
            token_ids=PROMPT,
            num_prompt_tokens=len(PROMPT),
            num_computed_tokens=0,
            block_ids=[3, 5],
            sampling=sampling,
        )
        tokens = []
        for number in range(num_tokens):
            begin = {"num_tokens": [1]}
            if number == 0:
                begin = {"freed_rows": self._used_rows, "new_rows": [start], "num_tokens": [len(PROMPT)]}
                self._used_rows = [0]
            result = self.step(rows=[0], **begin)
            assert isinstance(result, StepResult) and result.any_engine_busy
            tokens += result.token_ids
        return tokens

    def help(self, num_steps: int) -> None:
        for _ in range(num_steps):
            result = self.step(is_idle=True)
            assert isinstance(result, StepResult) and result.any_engine_busy and not result.rows


def form(engines: list[Engine], epoch: int) -> None:
    members = [engine.open(epoch) for engine in engines]
    together([partial(engine.join, epoch, members) for engine in engines])


def start_both(checkpoint, **options) -> list[Engine]:
    engines = [Engine(checkpoint, rank, **options) for rank in range(2)]
    for engine in engines:
        engine.start()
    form(engines, 1)
    return engines


def test_expert_workers_idle_engine_helps_busy_one(checkpoint, expected):
    first, second = start_both(checkpoint)
    tokens, _ = together([partial(first.generate, NUM_TOKENS), partial(second.help, NUM_TOKENS)])
    assert tokens == expected
    for result in together([partial(engine.step, is_idle=True) for engine in (first, second)]):
        assert isinstance(result, StepResult) and not result.any_engine_busy
    loads = [engine.call(ReadExpertLoad()) for engine in (first, second)]
    assert all(isinstance(load, WorkerExpertLoad) for load in loads)
    num_computed = len(PROMPT) + NUM_TOKENS - 1
    assert [load.counts.sum() for load in loads] == [num_computed * 3 * 3, 0]
    assert loads[0].counts.shape == (3, 8)
    assert loads[0].counts.dtype == np.int64
    for engine in (first, second):
        engine.worker.close()


def test_expert_worker_broken_step_leaves_worker_intact(checkpoint, expected):
    """A worker replies to steps without computing them until it has joined a group of the next epoch."""
    first, second = start_both(checkpoint, enable_eplb=True, eplb_step_interval=2)
    tokens, _ = together([partial(first.generate, 4), partial(second.help, 4)])
    assert tokens == expected[:4]
    second.worker.close()
    for _ in range(2):
        broken = first.step(rows=[0], num_tokens=[1])
        assert isinstance(broken, StepBroken)
        assert "an engine that shares the experts is gone" in broken.cause

    successor = Engine(checkpoint, 1, incarnation=1, enable_eplb=True, eplb_step_interval=2)
    successor.start()
    members = [engine.open(2) for engine in (first, successor)]
    broken = first.step(is_idle=True)
    assert isinstance(broken, StepBroken) and "epoch 2" in broken.cause
    together([partial(engine.join, 2, members) for engine in (first, successor)])
    tokens, _ = together([partial(first.generate, NUM_TOKENS), partial(successor.help, NUM_TOKENS)])
    assert tokens == expected
    for engine in (first, successor):
        engine.worker.close()


IDLE = StepPlan(step=1, freed_rows=[], new_rows=[], new_blocks=[], rows=[], num_tokens=[], is_idle=True)


def first_step(**sampling) -> StepPlan:
    """Return a step that computes the prompt."""
    row = NewRow(
        row=0,
        request_id="only",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        num_computed_tokens=0,
        block_ids=[3, 5],
        sampling=Sampling(seed=0, temperature=0.0, **sampling),
    )
    return replace(IDLE, new_rows=[row], rows=[0], num_tokens=[len(PROMPT)], is_idle=False)


def test_expert_worker_waits_for_the_token_before_a_grammar_until_its_group_breaks(checkpoint, monkeypatch):
    use_fake_device(monkeypatch, device := FakeDevice(may_wait=False))
    monkeypatch.setattr("eagleray.worker.worker._grammars_of", lambda _: worker_grammars(384))
    first, second = start_both(checkpoint)
    state = first.worker._state
    state.is_on_gpu = True
    num_checks = 0

    def check_processes() -> str | None:
        nonlocal num_checks
        num_checks += 1
        if num_checks < 3:
            return None
        while device.pending:
            device.complete()  # the group is left, which ends the operations of the steps
        return "an engine is gone"

    steps = [first_step(grammar=random_grammar("a")), replace(IDLE, step=2, rows=[0], num_tokens=[1], is_idle=False)]
    monkeypatch.setattr(state._groups.experts, "check_processes", check_processes)
    for plan in steps:
        helping = partial(second.worker.handle, Call(90, replace(IDLE, step=plan.step)))
        replies, _ = together([partial(first.worker.handle, Call(90, plan)), helping])
    assert [(reply.body.step, reply.body.cause) for reply in replies] == [(1, "an engine is gone")]
    broken, _ = first.worker.handle(Call(91, OpenGroup("expert", 2)))
    assert isinstance(broken.body, StepBroken) and broken.body.step == 2
    for engine in (first, second):
        engine.worker.close()


def test_expert_worker_leaves_group_without_waiting_for_steps_in_flight(checkpoint, monkeypatch):
    """A step may never end when a rank of another host has exited."""
    use_fake_device(monkeypatch, FakeDevice(may_wait=False))
    first, second = start_both(checkpoint)
    begun = [partial(engine.worker.handle, Call(90, plan)) for engine, plan in ((first, first_step()), (second, IDLE))]
    assert together(begun) == [[], []]
    for engine in (first, second):
        broken, opened = engine.worker.handle(Call(91, OpenGroup("expert", 2)))
        assert isinstance(broken.body, StepBroken) and isinstance(opened.body, GroupOpened)
        engine.worker.close()
