"""Frame handlers for the actors of the compiled graph's tests. Found by PYTHONPATH."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from eagleray.errors import FailedCall
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.steps import Call, Reply, StepPlan, StepResult
from eagleray.messages.workers import WorkerSpec

LONG_SECONDS = 60.0
LAG_SECONDS = 0.1


class EchoHandler:
    """Answers with the header and an array; some headers make it sleep or answer nothing."""

    def handle(self, frames: list[Any]) -> list[Any]:
        match frames[0]:
            case b"sleep":
                time.sleep(60)
            case b"nothing":
                return []
        return [frames[0], np.full(1000, len(frames), dtype=np.float32).data.cast("B"), *frames[1:]]

    def close(self) -> None:
        pass


def make(payload: bytes) -> EchoHandler:
    return EchoHandler()


def make_none(payload: bytes) -> EchoHandler:
    raise RuntimeError("it cannot be made")


class FailingHandler:
    """The second of two ranks fails, and the first one waits for it."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._spec = spec

    def handle(self, frames: list[Any]) -> list[Any]:
        if self._spec.rank == 0:
            time.sleep(LONG_SECONDS)
        call = Codec[Call](Call).decode(frames)
        failure = Ended(self._spec.worker, Failure.of(ZeroDivisionError("there is a bug")))
        raise FailedCall(bytes(Codec[Reply](Reply).encode(Reply(call.call_id, self._spec.rank, failure))[0]))

    def close(self) -> None:
        pass


def make_one_that_fails(payload: bytes) -> FailingHandler:
    return FailingHandler(msgspec.msgpack.decode(payload, type=WorkerSpec))


class LaggingHandler:
    """The rank that samples replies late; the others return no reply at once."""

    def __init__(self, spec: WorkerSpec) -> None:
        self._rank = spec.rank
        self._is_sampler = spec.rank == spec.topology.sampler_rank

    def handle(self, frames: list[Any]) -> list[Any]:
        if not self._is_sampler:
            return []
        time.sleep(LAG_SECONDS)
        call = Codec[Call](Call).decode(frames)
        assert isinstance(call.body, StepPlan)
        return Codec[Reply](Reply).encode(
            Reply(call.call_id, self._rank, StepResult(step=call.body.step, rows=[0], token_ids=[call.body.step]))
        )

    def close(self) -> None:
        pass


def make_one_that_lags(payload: bytes) -> LaggingHandler:
    return LaggingHandler(msgspec.msgpack.decode(payload, type=WorkerSpec))
