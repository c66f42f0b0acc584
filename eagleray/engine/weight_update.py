"""The phases of a weight update on the workers of an engine, whose reports are merged into one.

Receiving takes as long as the trainer does, so it is a generator that yields a description of its wait, and the engine
takes steps meanwhile. The other phases are short calls between two steps. Driven by `EngineControl`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

from eagleray.engine.timeouts import TRANSFER_POLL_SECONDS
from eagleray.errors import EngineFailed, TransferBroken
from eagleray.executor.executor import Executor
from eagleray.messages.control import CheckWeights, FetchWeights, OpenWeightTransfer, ReceiveWeights, ServeWeights
from eagleray.messages.failure import Failure
from eagleray.messages.weight_transfer import (
    ApplyUpdate,
    CheckUpdate,
    CloseTransfer,
    DropUpdate,
    FetchStorage,
    OpenTransfer,
    PollTransfer,
    ReceiveTensors,
    ServeStorage,
    StartUpdate,
    StorageServed,
    TransferDone,
    TransferProgress,
    UpdateApplied,
    UpdateChecked,
)

MOST_MISSING = 100
"""Limit for the number of missing weights that a reply names."""

Outcome = dict[str, Any] | Failure
"""Result of a command, see `CommandDone`, or its failure."""


class EngineWeightUpdate:
    """Has the workers of `executor` connect to a trainer, and receive, check and apply weights. A failure of one worker
    is the result of the whole engine, and nothing is applied.

    `wait_seconds` returns the time limit of a call that is queued behind the steps in flight. `host`: address of this
    host for engines on others.
    """

    def __init__(self, executor: Executor, *, wait_seconds: Callable[[], float], host: str | None = None) -> None:
        self._executor = executor
        self._host = host
        self._wait_seconds = wait_seconds
        self._is_in_place = False
        self.is_torn = False
        """Whether weights were overwritten by an update in place that was not applied."""

    def open_transfer(
        self, command: OpenWeightTransfer, *, is_cancelled: Callable[[], bool]
    ) -> Generator[str, None, Outcome]:
        """Connect to the trainer. Ends with a failure once `is_cancelled` returns True, as `receive` does."""
        call = OpenTransfer(init_info=command.init_info, first_rank=command.first_rank)
        replies = yield from self._run(
            call, "the trainer and the other workers to connect", CloseTransfer(), is_cancelled
        )
        if isinstance(replies, Failure):
            return replies
        return {"is_collective": any(reply.is_collective for reply in replies)}

    def close_transfer(self) -> Outcome:
        """Leave the trainer's group."""
        return self._done(CloseTransfer())

    def start(self, number: int, *, is_in_place: bool) -> Outcome:
        """Open the update of this number."""
        self._is_in_place = is_in_place
        return self._done(StartUpdate(number=number, is_in_place=is_in_place))

    def receive(self, command: ReceiveWeights, *, is_cancelled: Callable[[], bool]) -> Generator[str, None, Outcome]:
        """Receive tensors into the open update."""
        call = ReceiveTensors(update_info=command.update_info, weight_dir=command.weight_dir)
        was_torn = self.is_torn
        self.is_torn |= self._is_in_place
        replies = yield from self._run(call, "tensors of the trainer", DropUpdate(), is_cancelled)
        if isinstance(replies, Failure):
            if replies.is_user_error:
                self.is_torn = was_torn  # nothing is taken of a call with a wrong tensor
            return replies
        result: dict[str, Any] = {
            "num_tensors": max(reply.num_tensors for reply in replies),
            "num_bytes": max(reply.num_bytes for reply in replies),
        }
        return result if command.weight_dir is None else result | {"fingerprint": replies[0].fingerprint}

    def check(self, command: CheckWeights) -> Outcome:
        """Check that the open update can be applied on every worker."""
        call = CheckUpdate(require_complete=command.require_complete)
        replies = self._executor.call(call, UpdateChecked, timeout=self._wait_seconds())
        if (failure := _first_failure(replies)) is not None:
            self._done(DropUpdate())
            return failure
        missing = sorted({name for reply in replies for name in reply.missing})
        return {"missing": missing[:MOST_MISSING], "num_missing": len(missing)}

    def apply(self, number: int, timeout: float) -> bool:
        """Apply the update of this number. Returns False if the workers have no such update. No step may be in flight,
        because some workers would compute it with the old weights and others with the new ones.

        Raises `EngineFailed` if only some workers have the update: the engine would mix weights.
        """
        replies = self._executor.call(ApplyUpdate(number), UpdateApplied, timeout=timeout)
        applied = [rank for rank, reply in enumerate(replies) if reply.is_applied]
        if applied and len(applied) < len(replies):
            raise EngineFailed(f"weight update {number} was applied by rank {', '.join(map(str, applied))} alone")
        if applied:
            self.is_torn = False
        return bool(applied)

    def serve(self, command: ServeWeights, timeout: float) -> Outcome:
        """Offer the weights to another engine."""
        call = ServeStorage(number=command.update, timeout=timeout, host=self._host)
        replies = self._executor.call(call, StorageServed, timeout=self._wait_seconds())
        return _first_failure(replies) or {"handles": [reply.handle for reply in replies]}

    def fetch(
        self, command: FetchWeights, timeout: float, *, is_cancelled: Callable[[], bool]
    ) -> Generator[str, None, Outcome]:
        """Get the weights from another engine, or from a directory."""
        self.is_torn = True
        if command.weight_dir is None:
            call = FetchStorage(number=command.update, handles=command.handles, timeout=timeout)
            replies = yield from self._run(call, "weights of another engine", DropUpdate(), is_cancelled)
            if isinstance(replies, Failure):
                return replies
        else:
            failure = yield from self._read(command, timeout, is_cancelled)
            if failure is not None:
                return failure
        self.is_torn = False
        return {"update": command.update}

    def _read(
        self, command: FetchWeights, timeout: float, is_cancelled: Callable[[], bool]
    ) -> Generator[str, None, Failure | None]:
        """Have the workers read all weights from a directory and apply them. Returns a failure."""
        started = self.start(command.update, is_in_place=False)
        if isinstance(started, Failure):
            return started
        call = ReceiveTensors(weight_dir=command.weight_dir, fingerprint=command.fingerprint)
        replies = yield from self._run(call, "weights of a directory", DropUpdate(), is_cancelled)
        if isinstance(replies, Failure):
            return replies
        checked = self.check(CheckWeights(require_complete=True))
        if isinstance(checked, Failure):
            return checked
        self.apply(command.update, timeout)
        return None

    def drop(self) -> Outcome:
        """Drop the open update."""
        return self._done(DropUpdate())

    def _run(
        self,
        call: OpenTransfer | ReceiveTensors | FetchStorage,
        awaited: str,
        undo: CloseTransfer | DropUpdate,
        is_cancelled: Callable[[], bool],
    ) -> Generator[str, None, list[TransferProgress] | Failure]:
        """Make a call on every worker and poll until it is done. If it fails on one, is cancelled, or the generator is
        closed, `undo` is called on all."""
        is_done = False
        pending = self._executor.begin(call, TransferProgress)
        try:
            while True:
                while (replies := pending.poll()) is None:
                    yield "the workers"
                if (failure := _first_failure(replies.values())) is not None:
                    return failure
                if all(reply.is_done for reply in replies.values()):
                    is_done = True
                    return list(replies.values())
                due = time.monotonic() + TRANSFER_POLL_SECONDS
                is_due = False
                while not is_due:
                    if is_cancelled():
                        return Failure.of(TransferBroken(f"waiting for {awaited} was broken off"))
                    yield awaited
                    is_due = time.monotonic() >= due
                pending = self._executor.begin(PollTransfer(), TransferProgress)
        finally:
            pending.drop()
            if not is_done:
                self._done(undo)

    def _done(self, call: StartUpdate | DropUpdate | CloseTransfer) -> Outcome:
        return _first_failure(self._executor.call(call, TransferDone, timeout=self._wait_seconds())) or {}


def _first_failure(
    replies: Iterable[TransferProgress | UpdateChecked | TransferDone | StorageServed],
) -> Failure | None:
    """Return the failure of the lowest rank. A rank whose group was broken by others counts only if no rank has another
    failure."""
    failures = [reply.failure for reply in replies if reply.failure is not None]
    causes = [failure for failure in failures if failure.kind != TransferBroken.__name__]
    return next(iter(causes or failures), None)
