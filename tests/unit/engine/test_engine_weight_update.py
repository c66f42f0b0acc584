"""Phases of a weight update on an engine of two workers, which are objects of this process; the trainer is a thread."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_update import FakeModel
from safetensors.torch import save_file

from eagleray.engine.weight_update import EngineWeightUpdate, Outcome
from eagleray.errors import EngineFailed
from eagleray.executor.executor import Executor
from eagleray.messages.control import CheckWeights, OpenWeightTransfer, ReceiveWeights
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack
from eagleray.messages.steps import Call, Reply
from eagleray.messages.workers import Topology
from eagleray.weights import Sender, SharedMemorySender
from eagleray.worker.weight_update import WeightUpdater

TIMEOUT = 30.0
FULL = [
    ("q", torch.full((4,), 1.0)),
    ("far", torch.ones(9)),
    ("k", torch.full((4,), 2.0)),
    ("up", torch.full((4,), 3.0)),
]


class UpdatingGroup:
    """Workers that receive weights, and nothing else."""

    def __init__(self, num_workers: int, *, timeout: float = TIMEOUT) -> None:
        self.topology = Topology(
            tensor_parallel_size=num_workers,
            pipeline_parallel_size=1,
            nodes=["here"] * num_workers,
            addresses=["127.0.0.1"] * num_workers,
        )
        self.models = [FakeModel() for _ in range(num_workers)]
        self.workers = [
            WeightUpdater(model.start_update, rank=rank, device=torch.device("cpu"), init_defaults={}, timeout=timeout)
            for rank, model in enumerate(self.models)
        ]
        self._replies: deque[Reply] = deque()

    def send(self, call: Call) -> None:
        body: Any = call.body
        self._replies += [Reply(call.call_id, rank, worker.handle(body)) for rank, worker in enumerate(self.workers)]

    def receive(self, timeout: float) -> Reply | None:
        return self._replies.popleft() if self._replies else None

    def check(self) -> None:
        pass

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


@pytest.fixture
def group() -> Iterator[UpdatingGroup]:
    group = UpdatingGroup(2)
    yield group
    group.close()


@pytest.fixture
def engine(group: UpdatingGroup) -> EngineWeightUpdate:
    return EngineWeightUpdate(Executor(group), wait_seconds=lambda: TIMEOUT)


def never() -> bool:
    return False


def run(execution: Generator[str, None, Outcome]) -> Outcome:
    """Resume the generator until it returns, as the engine's loop does after every step."""
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            next(execution)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        time.sleep(0.001)
    raise AssertionError("the generator did not return")


def open_group(engine: EngineWeightUpdate, sender: Sender) -> None:
    with ThreadPoolExecutor() as pool:
        connected = pool.submit(sender.connect)
        command = OpenWeightTransfer(init_info=sender.init_info, first_rank=0)
        assert run(engine.open_transfer(command, is_cancelled=never)) == {"is_collective": True}
        connected.result(TIMEOUT)


def receive(engine: EngineWeightUpdate, update_info: Any, *, is_cancelled: Callable[[], bool] = never) -> Outcome:
    command = ReceiveWeights(update_info=pack(update_info))
    return run(engine.receive(command, is_cancelled=is_cancelled))


def weights_of(group: UpdatingGroup) -> list[dict[str, float]]:
    return [{name: float(tensor[0]) for name, tensor in model.weights.items()} for model in group.models]


def message_of(outcome: Outcome) -> str:
    assert isinstance(outcome, Failure), outcome
    return str(outcome)


def test_update_by_gloo_two_calls_is_applied_on_all_workers(engine: EngineWeightUpdate, group: UpdatingGroup) -> None:
    sender = Sender(2, timeout=TIMEOUT)
    open_group(engine, sender)
    assert engine.start(1, is_in_place=False) == {}
    for part in (FULL[:2], FULL[2:]):
        with ThreadPoolExecutor() as pool:
            sent = pool.submit(sender.send, part)
            received = receive(engine, sender.update_info(part))
            sent.result(TIMEOUT)
        assert received == {"num_tensors": 2, "num_bytes": sum(tensor.nbytes for _, tensor in part)}
    assert engine.check(CheckWeights(require_complete=True)) == {"missing": [], "num_missing": 0}
    assert weights_of(group) == [{"q": 0, "k": 0, "up": 0}] * 2
    assert engine.apply(1, TIMEOUT)
    assert weights_of(group) == [{"q": 1, "k": 2, "up": 3}] * 2
    assert not engine.apply(1, TIMEOUT), "nothing is staged any longer"
    assert engine.close_transfer() == {}
    sender.close()


@pytest.mark.parametrize("is_list", [False, True])
def test_update_by_shared_memory_needs_no_transfer(
    engine: EngineWeightUpdate, group: UpdatingGroup, is_list: bool
) -> None:
    with SharedMemorySender() as sender:
        info = sender.write(FULL)
        engine.start(5, is_in_place=False)
        assert receive(engine, [info, info] if is_list else info) == {"num_tensors": 4, "num_bytes": 4 * (12 + 9)}
    assert engine.apply(5, TIMEOUT)
    assert weights_of(group) == [{"q": 1, "k": 2, "up": 3}] * 2


def test_update_by_directory_partial_names_what_stays(
    engine: EngineWeightUpdate, group: UpdatingGroup, tmp_path: Path
) -> None:
    save_file({"up": torch.full((4,), 7.0)}, tmp_path / "model.safetensors")
    engine.start(1, is_in_place=False)
    run(engine.receive(ReceiveWeights(update_info=b"", weight_dir=str(tmp_path)), is_cancelled=never))
    assert engine.check(CheckWeights(require_complete=False)) == {"missing": ["k", "q"], "num_missing": 2}
    assert engine.apply(1, TIMEOUT)
    assert weights_of(group) == [{"q": 0, "k": 0, "up": 7}] * 2


@pytest.mark.parametrize(
    ("sent", "require_complete", "message"),
    [
        (FULL[:1], False, "weight update 1 lacks k: tensors that are packed together must all come"),
        (FULL[3:], True, "weight update 1 must have every weight, but k, q is missing"),
    ],
)
def test_check_incomplete_update_is_refused_and_dropped(
    engine: EngineWeightUpdate, group: UpdatingGroup, sent: Any, require_complete: bool, message: str
) -> None:
    with SharedMemorySender() as sender:
        engine.start(1, is_in_place=False)
        receive(engine, sender.write(sent))
    assert message_of(engine.check(CheckWeights(require_complete=require_complete))).endswith(message)
    assert not engine.apply(1, TIMEOUT)
    assert weights_of(group) == [{"q": 0, "k": 0, "up": 0}] * 2


def test_receive_wrong_tensor_by_gloo_is_named_and_breaks_the_sender(
    engine: EngineWeightUpdate, group: UpdatingGroup
) -> None:
    sender = Sender(2, timeout=TIMEOUT)
    open_group(engine, sender)
    engine.start(1, is_in_place=False)
    wrong = [("q", torch.zeros(4)), ("v", torch.zeros(2**21))]
    with ThreadPoolExecutor() as pool:
        sent: Future[None] = pool.submit(sender.send, wrong)
        assert message_of(receive(engine, sender.update_info(wrong))) == "the model has no tensor 'v'"
        assert "the connection to the workers broke" in str(sent.exception(TIMEOUT))
    assert not engine.apply(1, TIMEOUT)
    engine.start(2, is_in_place=False)
    assert "the trainer must open another" in message_of(receive(engine, sender.update_info(FULL)))


@pytest.mark.parametrize("ends_by", ["cancellation", "deadline"])
def test_receive_trainer_that_sends_nothing_can_be_broken_off(
    ends_by: str,
) -> None:
    group = UpdatingGroup(2, timeout=0.7)  # limits the wait of the threads that are left alone
    engine = EngineWeightUpdate(Executor(group), wait_seconds=lambda: TIMEOUT)
    is_cancelled = False
    sender = Sender(2, timeout=TIMEOUT)
    open_group(engine, sender)
    engine.start(1, is_in_place=False)
    waits = engine.receive(
        ReceiveWeights(update_info=pack(sender.update_info(FULL))), is_cancelled=lambda: is_cancelled
    )
    assert next(waits) == "tensors of the trainer"
    if ends_by == "deadline":
        waits.close()
    else:
        is_cancelled = True
        assert "was broken off" in message_of(run(waits))
    assert not engine.apply(1, TIMEOUT)
    sender.close()


def test_open_transfer_wrong_init_info_names_the_field(engine: EngineWeightUpdate) -> None:
    command = OpenWeightTransfer(init_info={"backend": "gloo", "master_address": "h", "world_size": 3}, first_rank=0)
    message = message_of(run(engine.open_transfer(command, is_cancelled=never)))
    assert message == "init_info of backend gloo: object missing required field `master_port`"


def test_open_transfer_trainer_that_is_not_there_can_be_broken_off(engine: EngineWeightUpdate) -> None:
    sender = Sender(2)
    info = sender.init_info
    sender.close()
    waits = engine.open_transfer(OpenWeightTransfer(init_info=info, first_rank=0), is_cancelled=lambda: True)
    assert "to connect was broken off" in message_of(run(waits))


@pytest.mark.parametrize(
    ("update_info", "message"),
    [
        ({"names": []}, "there is no group with the trainer: call init_weight_transfer_engine first"),
        ({"backend": "gloo"}, "there is no group with the trainer of backend gloo"),
        (3, "`update_info` must be an object, or a list of one for each worker, but it is a int"),
        ([{}], "but it is a list"),
    ],
)
def test_receive_unusable_update_info_says_what_is_needed(
    engine: EngineWeightUpdate, update_info: Any, message: str
) -> None:
    engine.start(1, is_in_place=False)
    assert message in message_of(receive(engine, update_info))


def test_receive_without_an_open_update_is_refused(engine: EngineWeightUpdate) -> None:
    assert "call start_weight_update first" in message_of(receive(engine, {"backend": "shm"}))


def test_apply_update_that_one_worker_lacks_raises(engine: EngineWeightUpdate, group: UpdatingGroup) -> None:
    engine.start(1, is_in_place=False)
    group.workers[1].close()
    with pytest.raises(EngineFailed, match="weight update 1 was applied by rank 0 alone"):
        engine.apply(1, TIMEOUT)


def test_update_in_place_is_written_when_it_comes(engine: EngineWeightUpdate, group: UpdatingGroup) -> None:
    with SharedMemorySender() as sender:
        engine.start(1, is_in_place=True)
        receive(engine, sender.write(FULL))
    assert weights_of(group) == [{"q": 1, "k": 2, "up": 3}] * 2
    assert engine.apply(1, TIMEOUT)
