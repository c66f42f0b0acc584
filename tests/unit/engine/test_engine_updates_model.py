"""Weights of a trainer in the model of an engine, which must be that of a fresh start on them."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from eagleray.config.build import build_config
from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.engine.startup import start_engine
from eagleray.engine.weight_update import EngineWeightUpdate, Outcome
from eagleray.executor.executor import Executor
from eagleray.executor.in_process import InProcessGroup
from eagleray.identity import EngineId
from eagleray.messages.control import CheckWeights, FetchWeights, OpenWeightTransfer, ReceiveWeights, ServeWeights
from eagleray.messages.failure import Failure
from eagleray.messages.plain import pack
from eagleray.weights import Sender, SharedMemorySender
from eagleray.weights.disk import directory_fingerprint
from eagleray.worker.storage_transfer import StorageHandle

ENGINE = EngineId("i", 0)
TIMEOUT = 60.0
Weights = dict[str, torch.Tensor]


class StartedModel:
    """An engine with the model of a directory."""

    def __init__(self, directory: Path, **options: Any) -> None:
        config = build_config(model=str(directory), num_kv_blocks=32, max_model_len=64, **options)
        self._group = InProcessGroup(ENGINE, config)
        self._executor = Executor(self._group)
        start_engine(config, self._executor, deadline=math.inf)
        self.updates = EngineWeightUpdate(self._executor, wait_seconds=lambda: TIMEOUT)

    def memory(self) -> list[bytes]:
        """Return the bytes of all packed weights."""
        model = self._group._worker._state._model  # type: ignore[union-attr]
        return [part.numpy().tobytes() for part in model.storage()]

    def close(self) -> None:
        self._executor.close()


def wait_for_threads(name: str) -> None:
    for thread in threading.enumerate():
        if thread.name == name:
            thread.join(TIMEOUT)
            assert not thread.is_alive()


@pytest.fixture(scope="module")
def pushed() -> Weights:
    """Weights of another step of training."""
    old = load_file(DEMO_MODEL_DIR / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    return {
        name: (tensor.float() + 0.01 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in old.items()
    }


@pytest.fixture(scope="module")
def pushed_dir(pushed: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("pushed")
    for path in DEMO_MODEL_DIR.iterdir():
        if path.name != "model.safetensors" and path.is_file():
            (directory / path.name).symlink_to(path)
    save_file(pushed, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def expected(pushed_dir: Path) -> list[bytes]:
    """Memory of a model that was started on the pushed weights."""
    started = StartedModel(pushed_dir)
    memory = started.memory()
    started.close()
    return memory


@pytest.fixture
def started() -> Iterator[StartedModel]:
    started = StartedModel(DEMO_MODEL_DIR)
    yield started
    started.close()


def run(execution: Generator[str, None, Outcome]) -> Outcome:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        try:
            next(execution)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        time.sleep(0.001)
    raise AssertionError("the generator did not return")


def receive(updates: EngineWeightUpdate, update_info: dict[str, Any]) -> Outcome:
    return run(updates.receive(ReceiveWeights(update_info=pack(update_info)), is_cancelled=lambda: False))


def push_by_gloo(updates: EngineWeightUpdate, weights: Weights) -> None:
    sender = Sender(1, timeout=TIMEOUT, bucket_bytes=10_000)
    named = list(weights.items())
    with ThreadPoolExecutor() as pool:
        connected = pool.submit(sender.connect)
        run(
            updates.open_transfer(
                OpenWeightTransfer(init_info=sender.init_info, first_rank=0), is_cancelled=lambda: False
            )
        )
        connected.result(TIMEOUT)
        sent = pool.submit(sender.send, named)
        assert receive(updates, Sender.update_info(named)) == {
            "num_tensors": len(named),
            "num_bytes": sum(tensor.nbytes for _, tensor in named),
        }
        sent.result(TIMEOUT)
    updates.close_transfer()
    sender.close()


@pytest.mark.parametrize("backend", ["gloo", "shm", "disk"])
def test_update_memory_equals_that_of_a_fresh_start(
    started: StartedModel, pushed: Weights, pushed_dir: Path, expected: list[bytes], backend: str
) -> None:
    updates, before = started.updates, started.memory()
    assert before != expected
    assert updates.start(1, is_in_place=False) == {}
    match backend:
        case "gloo":
            push_by_gloo(updates, pushed)
        case "shm":
            with SharedMemorySender() as sender:
                half = len(pushed) // 2
                for part in (list(pushed.items())[half:], list(pushed.items())[:half]):
                    assert "num_tensors" in receive(updates, sender.write(part))
        case "disk":
            command = ReceiveWeights(update_info=b"", weight_dir=str(pushed_dir))
            assert "num_tensors" in run(updates.receive(command, is_cancelled=lambda: False))
    assert updates.check(CheckWeights(require_complete=True)) == {"missing": [], "num_missing": 0}
    assert started.memory() == before, "the old weights serve until the update is applied"
    assert updates.apply(1, TIMEOUT)
    assert started.memory() == expected


def test_update_wrong_shape_changes_nothing(started: StartedModel, pushed: Weights) -> None:
    before = started.memory()
    name = next(iter(pushed))
    with SharedMemorySender() as sender:
        started.updates.start(1, is_in_place=False)
        failure = receive(started.updates, sender.write([*list(pushed.items())[1:], (name, torch.zeros(3))]))
    assert isinstance(failure, Failure) and failure.kind == "WeightsMismatch"
    assert f"tensor {name!r} has the shape [3]" in failure.message
    assert not started.updates.apply(1, TIMEOUT)
    assert started.memory() == before


def test_update_dropped_can_be_followed_by_another(
    started: StartedModel, pushed: Weights, expected: list[bytes]
) -> None:
    with SharedMemorySender() as sender:
        info = sender.write(pushed.items())
        for number in (1, 2):
            started.updates.start(number, is_in_place=False)
            receive(started.updates, info)
            if number == 1:
                assert started.updates.drop() == {}
    assert started.updates.apply(2, TIMEOUT)
    assert started.memory() == expected


def fetch(updates: EngineWeightUpdate, command: FetchWeights) -> Outcome:
    return run(updates.fetch(command, TIMEOUT, is_cancelled=lambda: False))


def offer(updates: EngineWeightUpdate, update: int) -> list[bytes]:
    offered = updates.serve(ServeWeights(update=update), TIMEOUT)
    assert not isinstance(offered, Failure), offered
    handles: list[bytes] = offered["handles"]
    return handles


@pytest.fixture
def updated(pushed: Weights) -> Iterator[StartedModel]:
    """An engine with the weights of update 3."""
    updated = StartedModel(DEMO_MODEL_DIR)
    with SharedMemorySender() as sender:
        updated.updates.start(3, is_in_place=False)
        receive(updated.updates, sender.write(pushed.items()))
    assert updated.updates.apply(3, TIMEOUT)
    yield updated
    updated.close()


def test_successor_copies_the_memory_of_another_engine(
    started: StartedModel, updated: StartedModel, expected: list[bytes]
) -> None:
    command = FetchWeights(update=3, handles=offer(updated.updates, 3))
    assert fetch(started.updates, command) == {"update": 3}
    assert started.memory() == expected
    copied_back = FetchWeights(update=3, handles=offer(started.updates, 3))
    assert fetch(updated.updates, copied_back) == {"update": 3}, "it is a source itself now"


def test_offer_of_another_update_is_refused(updated: StartedModel) -> None:
    failure = updated.updates.serve(ServeWeights(update=2), TIMEOUT)
    assert isinstance(failure, Failure) and "has weights of update 3, not of 2" in failure.message


def test_copy_of_weights_that_change_meanwhile_is_refused(
    started: StartedModel, updated: StartedModel, pushed_dir: Path
) -> None:
    handles = offer(updated.updates, 3)
    fetch(updated.updates, FetchWeights(update=4, weight_dir=str(pushed_dir)))
    failure = fetch(started.updates, FetchWeights(update=3, handles=handles))
    assert isinstance(failure, Failure) and "changed its weights while it sent them" in failure.message
    assert started.updates.is_torn


def test_copy_of_weights_that_were_replaced_under_the_same_number_is_refused(
    started: StartedModel, updated: StartedModel, pushed_dir: Path
) -> None:
    """As by a sleep that drops them and a copy from another engine after it."""
    handles = offer(updated.updates, 3)
    assert fetch(updated.updates, FetchWeights(update=3, weight_dir=str(pushed_dir))) == {"update": 3}
    failure = fetch(started.updates, FetchWeights(update=3, handles=handles))
    assert isinstance(failure, Failure) and "changed its weights while it sent them" in failure.message


def test_copy_with_another_key_is_refused(started: StartedModel, updated: StartedModel) -> None:
    handle = msgspec.msgpack.decode(offer(updated.updates, 3)[0], type=StorageHandle)
    wrong = msgspec.msgpack.encode(msgspec.structs.replace(handle, key=b"x" * len(handle.key)))
    failure = fetch(started.updates, FetchWeights(update=3, handles=[wrong]))
    assert isinstance(failure, Failure) and "was closed too soon" in failure.message


def test_copy_broken_off_writes_nothing_any_longer(updated: StartedModel, expected: list[bytes]) -> None:
    """The source stalls after the first bytes, and goes on when the weights have come from another one."""
    copying = StartedModel(DEMO_MODEL_DIR)
    handle = msgspec.msgpack.decode(offer(updated.updates, 3)[0], type=StorageHandle)
    with (
        socket.create_connection((handle.host, handle.port)) as offered,
        socket.create_server(("127.0.0.1", 0)) as stalling,
    ):
        offered.sendall(handle.key)
        start = b"".join(iter(lambda: offered.recv(4096), b""))[:1000]
        stalled = StorageHandle("127.0.0.1", stalling.getsockname()[1], handle.key)
        command = FetchWeights(update=3, handles=[msgspec.msgpack.encode(stalled)])
        fetching = copying.updates.fetch(command, TIMEOUT, is_cancelled=lambda: False)
        next(fetching)
        connection, _ = stalling.accept()
        with connection:
            connection.sendall(start)
            fetching.close()
            assert fetch(copying.updates, FetchWeights(update=3, handles=offer(updated.updates, 3))) == {"update": 3}
            with contextlib.suppress(ConnectionError):
                connection.sendall(bytes(sum(map(len, expected))))
            wait_for_threads("weights-fetch")
    assert copying.memory() == expected
    copying.close()


def test_copy_of_a_model_of_another_layout_is_refused(updated: StartedModel) -> None:
    other = StartedModel(DEMO_MODEL_DIR, attention_backend="torch")
    before = other.memory()
    failure = fetch(other.updates, FetchWeights(update=3, handles=offer(updated.updates, 3)))
    assert isinstance(failure, Failure) and "weights of another layout" in failure.message
    assert other.memory() == before
    other.close()


def test_successor_reads_an_unchanged_directory(started: StartedModel, pushed_dir: Path, expected: list[bytes]) -> None:
    directory = str(pushed_dir)
    changed = FetchWeights(update=1, weight_dir=directory, fingerprint="of earlier files")
    failure = fetch(started.updates, changed)
    assert isinstance(failure, Failure) and "files have changed since" in failure.message
    unchanged = FetchWeights(update=1, weight_dir=directory, fingerprint=directory_fingerprint(directory))
    assert fetch(started.updates, unchanged) == {"update": 1}
    assert started.memory() == expected
