"""Steps that begin before the ones before them are finished, on a device that completes them when told."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from fake_device import ArgmaxSampler, FakeDevice, use_fake_device
from harness import Answer, LocalEngine, random_prompt
from no_host_reads import no_host_reads
from random_grammars import RandomMatcher, grammar_rows, random_grammar, worker_grammars

from eagleray.errors import ChannelClosed
from eagleray.executor.in_process import InProcessGroup
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.ranking import Ranking
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import Call, CallExtension, ExtensionReturned, NewRow, Reply, StepPlan, StepResult
from eagleray.models.registry import load_model
from eagleray.worker.grammar_rows import GrammarRows
from eagleray.worker.input_batch import InputBatch
from eagleray.worker.runner import Runner
from eagleray.worker.sampler import HostSampler
from eagleray.worker.sampling_state import SamplingState
from eagleray.worker.startup import sampler_of
from eagleray.worker.worker import serve

CPU = torch.device("cpu")
BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 4, 64, 384
WAIT_SECONDS = 30.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3", tokenizer=False)


@pytest.fixture(autouse=True)
def plain_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: TorchBackend())


def make_runner(checkpoint: Path, device: FakeDevice, grammars: GrammarRows | None = None) -> Runner:
    model = load_model(checkpoint, dtype="auto", load_format="auto", device=CPU, seed=None, on_progress=None)
    shape = model.cache_shape(BLOCK_SIZE)
    cache = KVCache.allocate(shape, num_blocks=NUM_BLOCKS, dtype=model.dtype, device=CPU)
    rows = InputBatch(num_rows=4, max_model_len=64, block_size=BLOCK_SIZE)
    return Runner(model, cache, rows, ArgmaxSampler(4, grammars), device)


def new_row(row: int, token_ids: list[int], **sampling: Any) -> NewRow:
    return NewRow(
        row=row,
        request_id=str(row),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=0,
        block_ids=list(range(16 * row, 16 * row + 16)),
        sampling=Sampling(seed=0, temperature=0.0, **sampling),
    )


def plan(step: int, rows: dict[int, int], *new_rows: NewRow, freed_rows: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(
        step=step,
        freed_rows=list(freed_rows),
        new_rows=list(new_rows),
        new_blocks=[],
        rows=list(rows),
        num_tokens=list(rows.values()),
    )


PLANS = [
    plan(0, {0: 5, 1: 3}, new_row(0, [1, 2, 3, 4, 5], prompt_logprobs=2), new_row(1, [7, 8, 9])),
    plan(1, {0: 1, 1: 1}),
    plan(2, {0: 1, 2: 4}, new_row(2, [30, 31, 32, 33, 34]), freed_rows=(1,)),
    plan(3, {0: 1, 2: 1, 1: 2}, new_row(1, [50, 51])),
    plan(4, {1: 1, 2: 1}),
]
"""Rows of one token and of several, chunks of a prompt, and a row that another request takes over."""


def tokens(result: StepResult) -> dict[int, int]:
    return dict(zip(result.rows, result.token_ids, strict=True))


@pytest.mark.parametrize("ahead", [1, 2, 5])
def test_runner_steps_begun_ahead_give_the_tokens_of_finished_ones(checkpoint, ahead):
    alone = make_runner(checkpoint, FakeDevice())
    expected = [alone.finish(alone.begin(plan)) for plan in PLANS]
    device = FakeDevice(may_wait=False)
    runner, unfinished, results = make_runner(checkpoint, device), [], []
    for step in PLANS:
        unfinished.append(runner.begin(step))
        assert not unfinished[-1].is_done
        if len(unfinished) > ahead:
            device.complete()
            assert unfinished[0].is_done
            results.append(runner.finish(unfinished.pop(0)))
    for step in unfinished:
        device.complete()
        results.append(runner.finish(step))
    assert [tokens(result) for result in results] == [tokens(result) for result in expected]
    assert [result.step for result in results] == [0, 1, 2, 3, 4]
    scored, wanted = results[0].prompt_logprobs[0], expected[0].prompt_logprobs[0]
    assert scored.start == 1 and scored.token_ids.tolist() == wanted.token_ids.tolist()
    assert scored.logprobs.tolist() == wanted.logprobs.tolist() and len(results[1].prompt_logprobs) == 0


GRAMMAR_PLANS = [
    plan(0, {0: 5, 1: 3}, new_row(0, [1, 2, 3, 4, 5], grammar=random_grammar("a")), new_row(1, [7, 8, 9])),
    plan(1, {1: 1, 2: 2}, new_row(2, [30, 31, 32, 33], grammar=random_grammar("b"))),
    plan(2, {0: 1, 1: 1, 2: 2}),
    plan(3, {0: 1, 2: 1, 3: 2}, new_row(3, [50, 51], grammar=random_grammar("b"))),
    plan(4, {0: 1, 1: 1, 3: 1}, new_row(0, [60], grammar=random_grammar("c")), freed_rows=(0,)),
    plan(5, {0: 1, 2: 1, 3: 1}),
    plan(6, {1: 1}),
]
"""Rows with and without grammars, a prompt in two steps, and a row that is taken from one grammar by another while a
token of the former is on its way."""


@pytest.mark.parametrize("ahead", [1, 2, 7])
def test_runner_rows_with_grammars_in_steps_ahead_have_the_tokens_of_finished_ones(checkpoint, ahead):
    """The matchers assert that they are given each token that they allowed, in order, and no other row's."""
    alone = make_runner(checkpoint, FakeDevice(), grammar_rows(VOCAB_SIZE))
    expected = [tokens(alone.finish(alone.begin(plan))) for plan in GRAMMAR_PLANS]
    runner = make_runner(checkpoint, FakeDevice(), grammar_rows(VOCAB_SIZE))
    unfinished, results = [], []
    for step in GRAMMAR_PLANS:
        unfinished.append(runner.begin(step))
        if len(unfinished) > ahead:
            results.append(runner.finish(unfinished.pop(0)))
    results += [runner.finish(step) for step in unfinished]
    assert [tokens(result) for result in results] == expected
    assert [result.step for result in results] == [0, 1, 2, 3, 4, 5, 6]


def test_runner_waits_only_for_tokens_before_a_grammar_and_after_the_launch_of_the_pass(checkpoint, monkeypatch):
    device = FakeDevice()
    runner = make_runner(checkpoint, device, grammar_rows(VOCAB_SIZE))
    waits_at_launch, forward = [], runner._model.forward

    def record(*args: Any) -> torch.Tensor:
        waits_at_launch.append(device.num_waits)
        return forward(*args)

    monkeypatch.setattr(runner._model, "forward", record)
    waits_at_end, num_pending = [], []
    for step in GRAMMAR_PLANS:
        runner.begin(step)
        waits_at_end.append(device.num_waits)
        num_pending.append(len(device.pending))
    # Steps 2 to 5 have rows with a grammar whose last token is on its way.
    assert waits_at_end == [0, 0, 1, 2, 3, 4, 4]
    assert waits_at_launch == [0, 0, 0, 1, 2, 3, 4]
    assert num_pending == [1, 2, 2, 1, 1, 1, 2], "no step is waited for without need"


def test_runner_masks_of_cpus_are_computed_beside_the_pass(checkpoint, monkeypatch):
    """Neither the mask nor the pass ends before the other has begun."""
    mask_begins, pass_begins = threading.Event(), threading.Event()
    rows = grammar_rows(VOCAB_SIZE)
    runner = make_runner(checkpoint, FakeDevice())
    state = SamplingState(num_rows=4, vocab_size=VOCAB_SIZE, device=CPU)
    runner._sampler = HostSampler(state, Ranking(), grammars=rows)
    fill_mask, forward = RandomMatcher.fill_mask, runner._model.forward

    def fill(self: RandomMatcher, mask: np.ndarray) -> None:
        mask_begins.set()
        assert pass_begins.wait(WAIT_SECONDS), "the pass begins after the masks"
        fill_mask(self, mask)

    def run_pass(*args: Any) -> torch.Tensor:
        pass_begins.set()
        assert mask_begins.wait(WAIT_SECONDS), "the masks begin after the pass"
        return forward(*args)

    monkeypatch.setattr(RandomMatcher, "fill_mask", fill)
    monkeypatch.setattr(runner._model, "forward", run_pass)
    result = runner.finish(runner.begin(plan(0, {0: 2}, new_row(0, [1, 2], grammar=random_grammar("a")))))
    assert len(result.rows) == 1 and not result.failures


def test_runner_step_that_samples_nothing_is_done_when_the_device_has_computed_it(checkpoint):
    device = FakeDevice(may_wait=False)
    runner = make_runner(checkpoint, device)
    step = runner.begin(plan(0, {0: 3}, new_row(0, [1, 2, 3, 4, 5])))
    assert not step.is_done
    device.complete()
    result = runner.finish(step)
    assert step.is_done and not result.rows and not result.prompt_logprobs


def test_input_batch_late_token_does_not_reach_next_request_of_row():
    rows = InputBatch(num_rows=2, max_model_len=64, block_size=4)
    rows.add_row(new_row(0, [1, 2]))
    rows.add_row(new_row(1, [3]))
    expected = rows.expect_tokens(torch.tensor([0, 1]).numpy())
    assert rows.token_ids[0, :3].tolist() == [1, 2, -1] and rows.token_ids[1, :2].tolist() == [3, -2]
    rows.add_row(new_row(0, [90, 91, 92]))
    rows.set_tokens(expected, torch.tensor([5, 6]).numpy())
    assert rows.token_ids[0, :3].tolist() == [90, 91, 92]
    assert rows.token_ids[1, :2].tolist() == [3, 6]


def run_engine(checkpoint: Path, seed: int) -> dict[str, tuple[list[int], str | None]]:
    """Run random requests, half of them with grammars, in a cache that is too small for all. Some are aborted."""
    rng = random.Random(seed)
    options = {"block_size": 4, "num_kv_blocks": 17, "max_num_seqs": 4, "max_model_len": 64}
    with LocalEngine(checkpoint, max_num_batched_tokens=16, executor="in-process", **options) as engine:
        kept = {}
        for index in range(30):
            name = f"r{index}"
            prompt = random_prompt(1000 * seed + index, rng.randint(1, 24), 384)
            grammar = random_grammar(str(index % 5)) if index % 2 else None
            engine.add(name, prompt, max_tokens=rng.randint(1, 20), grammar=grammar)
            is_aborted = rng.random() < 0.3
            for _ in range(rng.randint(0, 3)):
                engine.step()
            if is_aborted:
                engine.abort(name)
            else:
                kept[name] = engine.answers[name]
        engine.run()
        assert engine.core.scheduler.stats().num_preemptions > 0, "the cache is too large for this test"
        return {name: (answer.token_ids, answer.finish_reason) for name, answer in kept.items()}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_engine_ahead_on_a_device_gives_the_same_answers_with_aborts_and_preemptions(checkpoint, seed, monkeypatch):
    monkeypatch.setattr("eagleray.worker.worker._grammars_of", lambda _: worker_grammars(VOCAB_SIZE))
    expected = run_engine(checkpoint, seed)
    use_fake_device(monkeypatch, device := FakeDevice())
    assert run_engine(checkpoint, seed) == expected
    assert device.most_pending == 2, "the next step begins while one runs"


def test_worker_extension_call_comes_after_the_steps_before_it(checkpoint, monkeypatch):
    use_fake_device(monkeypatch, device := FakeDevice())
    with LocalEngine(checkpoint, executor="in-process", max_model_len=64, block_size=4, num_kv_blocks=16) as engine:
        group = engine.executor._group
        assert isinstance(group, InProcessGroup)
        group.send(Call(100, plan(7, {0: 2}, new_row(0, [1, 2]))))
        assert len(device.pending) == 1 and group.receive(0) is None, "nobody waits for the step"
        group.send(Call(101, CallExtension("missing", b"")))
        assert not device.pending
        first, second = group.receive(0), group.receive(0)
        assert isinstance(first.body, StepResult) and first.body.step == 7
        assert isinstance(second.body, ExtensionReturned)


def test_worker_failure_of_a_step_in_flight_is_reported_once(checkpoint, monkeypatch):
    class BrokenDevice(FakeDevice):
        def complete(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    use_fake_device(monkeypatch, BrokenDevice())
    with LocalEngine(checkpoint, executor="in-process", max_model_len=64, block_size=4, num_kv_blocks=16) as engine:
        group = engine.executor._group
        group.send(Call(100, plan(0, {0: 2}, new_row(0, [1, 2]))))
        group.send(Call(101, plan(1, {0: 1})))
        reply = group.receive(1.0)
        assert isinstance(reply.body, Ended) and "illegal memory access" in reply.body.cause.message
        assert group.receive(1.0) is None
        group.send(Call(102, plan(2, {0: 1})))
        assert group.receive(1.0) is None


class ScriptedQueue:
    """A queue that gives the worker a call, nothing, or time for the device to complete a step, and then is closed."""

    def __init__(self, device: FakeDevice, *script: Call | str) -> None:
        self.device = device
        self.script = list(script)
        self.sent: list[int] = []
        """Steps that were replied to, and -1 for each call that the worker has taken."""

    def receive(self, timeout: float) -> list[Any] | None:
        if not self.script:
            raise ChannelClosed("the engine has closed the queue")
        entry = self.script.pop(0)
        if isinstance(entry, Call):
            self.sent.append(-1)
            return Codec(Call).encode(entry)
        assert timeout < 1, "the worker must look whether the device has completed a step"
        if entry == "complete":
            self.device.complete()
        return None

    def send(self, frames: list[Any], timeout: float) -> None:
        self.sent.append(Codec(Reply).decode(frames).body.step)


def test_serve_begins_the_next_step_while_the_device_computes(checkpoint, monkeypatch):
    use_fake_device(monkeypatch, device := FakeDevice(may_wait=False))
    with LocalEngine(checkpoint, executor="in-process", max_model_len=64, block_size=4, num_kv_blocks=16) as engine:
        steps = [Call(100, plan(0, {0: 2}, new_row(0, [1, 2])))] + [Call(100 + n, plan(n, {0: 1})) for n in (1, 2)]
        script = [steps[0], "wait", steps[1], "complete", "wait", steps[2], "complete", "complete"]
        queue = ScriptedQueue(device, *script)
        serve(engine.executor._group._worker, queue)
    assert queue.sent == [-1, -1, 0, -1, 1, 2]


@pytest.mark.grid  # the interpreter of the kernels takes most of its time
def test_engine_ahead_with_the_kernels_of_gpus_equals_plain_torch(checkpoint, monkeypatch):
    """The pass, the choice of tokens and log-probabilities are computed by the kernels of GPUs, interpreted, with
    padding to buckets. The host reads nothing before a step is complete."""

    def run() -> dict[str, Answer]:
        options = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 4, "max_model_len": 64}
        with LocalEngine(checkpoint, max_num_batched_tokens=8, executor="in-process", **options) as engine:
            engine.add("greedy", random_prompt(1, 11, 384), max_tokens=5, logprobs=2)
            engine.add("drawn", random_prompt(2, 3, 384), max_tokens=6, temperature=0.8, top_p=0.9, seed=7)
            engine.add("penalised", random_prompt(3, 6, 384), max_tokens=6, repetition_penalty=1.3, prompt_logprobs=1)
            return engine.run()

    expected = run()
    device = FakeDevice()
    use_fake_device(monkeypatch, device)
    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *_, **__: CudaBackend(torch.float32))
    monkeypatch.setattr("eagleray.worker.worker.sampler_of", sampler_of)
    monkeypatch.setattr(Runner, "begin", guarded(Runner.begin))
    found = run()
    assert device.most_pending == 2
    assert {name: answer.token_ids for name, answer in found.items()} == {
        name: answer.token_ids for name, answer in expected.items()
    }
    for reported, wanted in zip(found["greedy"].logprobs, expected["greedy"].logprobs, strict=True):
        assert reported.token_ids == wanted.token_ids and reported.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    scores = [np.concatenate([part.logprobs for part in run["penalised"].prompt_logprobs]) for run in (found, expected)]
    np.testing.assert_allclose(*scores, atol=1e-4)


def guarded(begin: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Runner, step: StepPlan) -> Any:
        if step.new_rows:  # the first step allocates memory
            return begin(self, step)
        with no_host_reads():
            return begin(self, step)

    return run
