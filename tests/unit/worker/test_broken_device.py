"""A GPU that fails in a step ends its worker with a report that names the cause, and nothing waits for that GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint
from fake_device import FakeDevice, FakeDownload, use_fake_device
from harness import LocalEngine
from ranks import topology

from eagleray.config.build import build_config
from eagleray.errors import ConfigError, ExpertGroupBroken
from eagleray.identity import EngineId, WorkerId
from eagleray.messages.failure import Ended
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import Call, NewRow, StepBroken, StepPlan
from eagleray.messages.workers import WorkerSpec
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.worker import entry
from eagleray.worker.device import choose_device
from eagleray.worker.runner import Runner
from eagleray.worker.worker import ServingWorker, Worker

ILLEGAL = "CUDA error: an illegal memory access was encountered"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("made"), "qwen3", tokenizer=False)


class BrokenDownload(FakeDownload):
    @property
    def is_done(self) -> bool:
        raise torch.AcceleratorError(ILLEGAL)

    def wait(self) -> Any:
        raise torch.AcceleratorError(ILLEGAL)


class BrokenDevice(FakeDevice):
    """Every question about a step fails, as in a context that an illegal access has broken."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> BrokenDownload:
        return BrokenDownload(tensors, lambda _: None)


def step(number: int, *new_rows: NewRow) -> StepPlan:
    return StepPlan(
        step=number, freed_rows=[], new_rows=list(new_rows), new_blocks=[], rows=[0], num_tokens=[2 if new_rows else 1]
    )


def first_step() -> StepPlan:
    sampling = Sampling(seed=0, temperature=0.0)
    row = NewRow(
        row=0,
        request_id="r",
        token_ids=[1, 2],
        num_prompt_tokens=2,
        num_computed_tokens=0,
        block_ids=list(range(16)),
        sampling=sampling,
    )
    return step(0, row)


def local_engine(checkpoint: Path) -> LocalEngine:
    return LocalEngine(checkpoint, executor="in-process", max_model_len=64, block_size=4, num_kv_blocks=16)


def worker_of(engine: LocalEngine) -> Worker:
    worker: Worker = engine.executor._group._worker  # type: ignore[attr-defined]
    return worker


def test_worker_ends_if_the_device_breaks_while_it_computes(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_fake_device(monkeypatch, BrokenDevice())
    with local_engine(checkpoint) as engine:
        worker = worker_of(engine)
        (reply,) = worker.handle(Call(1, first_step()))
        assert isinstance(reply.body, Ended)
        assert (reply.body.cause.kind, reply.body.cause.message) == ("AcceleratorError", ILLEGAL)
        assert worker.handle(Call(2, step(1))) == [] and not worker.has_unfinished


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_worker_that_runs_out_of_memory_in_a_step_ends(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_on_gpu: bool
) -> None:
    def begin(self: Runner, plan: StepPlan) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(Runner, "begin", begin)
    with local_engine(checkpoint) as engine:
        worker = worker_of(engine)
        assert isinstance(worker._state, ServingWorker)
        worker._state.is_on_gpu = is_on_gpu
        assert not worker.has_broken_device
        (reply,) = worker.handle(Call(1, first_step()))
        assert isinstance(reply.body, Ended) and str(reply.body.cause).startswith(
            "OutOfMemoryError: CUDA out of memory"
        )
        assert worker.has_broken_device == is_on_gpu


def test_worker_step_in_flight_is_broken_with_its_expert_group(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may have computed it without the experts of the engine that has exited."""
    use_fake_device(monkeypatch, device := FakeDevice(may_wait=False))
    begin = Runner.begin

    def begin_first(self: Runner, plan: StepPlan) -> Any:
        if plan.step > 0:
            raise ExpertGroupBroken("engine 1 has exited")
        return begin(self, plan)

    monkeypatch.setattr(Runner, "begin", begin_first)
    with local_engine(checkpoint) as engine:
        worker = worker_of(engine)
        assert worker.handle(Call(1, first_step())) == []
        assert worker.handle(Call(2, step(1))) == [], "the step before it is not done"
        device.complete()
        broken = [reply.body for reply in worker.finish_done()]
    assert broken == [StepBroken(step=number, cause="engine 1 has exited") for number in (0, 1)]


def test_worker_step_that_waits_for_an_exited_engine_is_broken(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU nothing but the look at the processes notices it, and leaving the group completes the step."""
    use_fake_device(monkeypatch, device := FakeDevice(may_wait=False))
    has_exited = False

    def check_processes(self: ExpertGroup) -> str | None:
        if not has_exited:
            return None
        device.complete()
        return "engine 1 has exited"

    monkeypatch.setattr(ExpertGroup, "check_processes", check_processes)
    with local_engine(checkpoint) as engine:
        worker = worker_of(engine)
        assert isinstance(worker._state, ServingWorker)
        worker._state.is_on_gpu = True
        assert worker.handle(Call(1, first_step())) == worker.finish_done() == []
        has_exited = True
        (reply,) = worker.finish_done()
    assert reply.body == StepBroken(step=0, cause="engine 1 has exited")


@pytest.mark.parametrize("is_broken", [False, True])
def test_worker_process_does_not_wait_for_a_broken_device(monkeypatch: pytest.MonkeyPatch, is_broken: bool) -> None:
    events: list[str] = []

    class Exited(BaseException):
        pass

    def exit_now(code: int) -> None:
        events.append(f"exit {code}")
        raise Exited

    closing = SimpleNamespace(close=lambda: None)
    fake = SimpleNamespace(close=lambda: events.append("close"), has_broken_device=is_broken)
    monkeypatch.setattr("os._exit", exit_now)
    monkeypatch.setattr(entry.MessageQueuePeer, "open", lambda *_, **__: closing)
    monkeypatch.setattr(entry.HeartbeatSender, "start", lambda *_, **__: closing)
    monkeypatch.setattr("eagleray.worker.worker.Worker", lambda *_, **__: fake)
    monkeypatch.setattr("eagleray.worker.worker.serve", lambda *_: events.append("serve"))
    spec = WorkerSpec(
        worker=WorkerId(EngineId("test", 0)),
        rank=0,
        config=build_config(model=None),
        topology=topology(),
        is_local=True,
        queue=b"",
        heartbeat=b"",
    )
    with suppress(Exited):
        entry.run(msgspec.msgpack.encode(spec))
    assert events[:2] == (["serve", "exit 1"] if is_broken else ["serve", "close"])


def test_choose_device_more_workers_than_gpus_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"worker 2 of this node needs a GPU of its own, but torch sees 2, .*: lower"):
        choose_device("cuda", 2)


def test_choose_device_cuda_without_a_gpu_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="cuda was asked for, but torch sees no CUDA device"):
        choose_device("cuda", 0)
