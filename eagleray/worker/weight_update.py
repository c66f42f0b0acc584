"""Weights from a trainer at one worker: the open transfer, the open update, and the thread that receives.

Owned by the serving worker, which passes it the engine's calls between steps. A failure is a reply, never an exception:
whatever a trainer sends, the worker goes on with the weights from before. Only `apply` raises, because a model whose
weights were written halfway must not compute.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagleray.errors import EagleRayError, InvalidRequest, TransferBroken, WeightsMismatch, WrongState
from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.plain import unpack
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
    TransferCall,
    TransferDone,
    TransferProgress,
    TransferReply,
    UpdateApplied,
    UpdateChecked,
)
from eagleray.parallel.rendezvous import LOOPBACK
from eagleray.weights.receiver import (
    GROUPLESS,
    ReceiverPosition,
    WeightReceiver,
    default_backend,
    open_receiver,
)
from eagleray.worker.staged_update import OpenUpdate, StartStaging, check_fingerprint, check_tensors
from eagleray.worker.storage_transfer import SharedStorage, StorageFetch, StorageOffer
from eagleray.worker.timeouts import TRANSFER_STOP_SECONDS

logger = get_logger(__name__)

SHOWN_NAMES = 3
"""Names of weights that an error shows."""


@dataclass
class TransferTask:
    """Something that a thread does. Its fields are written by the thread alone; `is_done` last."""

    thread: threading.Thread
    is_collective: bool
    close: Callable[[], None]
    """Keeps the thread from any further effect on the weights that steps read."""
    num_tensors: int = 0
    num_bytes: int = 0
    fingerprint: str = ""
    failure: Failure | None = None
    is_done: bool = False

    def progress(self) -> TransferProgress:
        is_done = self.is_done  # read before the numbers, which are final then
        return TransferProgress(
            is_done=is_done,
            num_tensors=self.num_tensors,
            num_bytes=self.num_bytes,
            is_collective=self.is_collective,
            fingerprint=self.fingerprint,
            failure=self.failure if is_done else None,
        )


class WeightUpdater:
    """Handles the calls of `messages.weight_transfer` of the worker `rank` of an engine.

    `backend` is used where `init_info` names none; `init_defaults` are its fields that `init_info` may leave out.
    `timeout` limits each wait for the trainer, in seconds. `on_open` is called when a trainer opens a transfer.
    """

    def __init__(
        self,
        start_staging: StartStaging,
        *,
        rank: int,
        device: torch.device,
        init_defaults: Mapping[str, Any],
        timeout: float,
        storage: SharedStorage | None = None,
        locate: Callable[[str], str] = str,
        on_open: Callable[[], None] = lambda: None,
    ) -> None:
        self._start_staging = start_staging
        self._on_open = on_open
        self._locate = locate
        self._storage = storage
        self._number: int | None = 0
        """Number of the update whose weights the model has; None if they are a mixture or were dropped."""
        self._offers: list[StorageOffer] = []
        self._rank = rank
        self._device = device
        self._init_defaults = init_defaults
        self._timeout = timeout
        self._position = ReceiverPosition(rank, device)
        self._receiver: WeightReceiver | None = None
        self._backend = ""
        self._update: OpenUpdate | None = None
        self._task: TransferTask | None = None

    def handle(self, call: TransferCall) -> TransferReply:
        match call:
            case PollTransfer():
                return TransferProgress(is_done=True) if self._task is None else self._task.progress()
            case OpenTransfer() | ReceiveTensors() | FetchStorage():
                return self._begin(call)
            case ServeStorage():
                return self._serve(call)
            case StartUpdate():
                return TransferDone(self._attempt(lambda: self._start(call)))
            case CheckUpdate(require_complete=require_complete):
                return self._check(require_complete)
            case ApplyUpdate(number):
                return UpdateApplied(self._apply(number))
            case DropUpdate():
                self._stop()
                self._drop()
            case CloseTransfer():
                self._close_receiver()
                self._stop()
        return TransferDone()

    def close(self) -> None:
        """Leave the trainer's group, and drop the open update."""
        self._close_receiver()
        self._stop()
        self._drop()
        self._replace_weights(None)

    # The thread.

    def _begin(self, call: OpenTransfer | ReceiveTensors | FetchStorage) -> TransferProgress:
        """Begin a task in a thread, if nothing forbids it."""
        if self._task is not None and not self._task.is_done:
            error = WrongState("this worker still receives: close the transfer or abort the update first")
            return TransferProgress(is_done=True, failure=Failure.of(error))
        try:
            match call:
                case OpenTransfer():
                    self._task = self._open(call)
                case ReceiveTensors():
                    self._task = self._receive(call)
                case FetchStorage():
                    self._task = self._fetch(call)
        except Exception as error:
            self._close_receiver()  # the trainer's broadcast fails; it would wait for this rank otherwise
            self._break_off()
            return TransferProgress(is_done=True, failure=Failure.of(error))
        return self._task.progress()

    def _run(
        self,
        name: str,
        work: Callable[[TransferTask], None],
        *,
        is_collective: bool,
        close: Callable[[], None] = lambda: None,
    ) -> TransferTask:
        def run() -> None:
            try:
                with torch.inference_mode():
                    work(task)
            except Exception as error:
                if not isinstance(error, EagleRayError):
                    logger.exception("%s failed", name)
                task.failure = Failure.of(error)
            task.is_done = True

        # a daemon, because gloo cannot be interrupted while it connects
        task = TransferTask(threading.Thread(target=run, name=name, daemon=True), is_collective, close)
        task.thread.start()
        return task

    def _stop(self) -> None:
        """Wait a moment for the thread. One that waits for a trainer ends at its time limit. Until then it has no
        effect: it has an update and a receiver of its own, which nothing else uses by then."""
        task, self._task = self._task, None
        if task is None or task.is_done:
            return
        self._close_receiver()
        task.close()
        task.thread.join(TRANSFER_STOP_SECONDS)
        self._break_off()

    def _break_off(self) -> None:
        if self._update is not None:
            self._update.is_broken = True

    # The transfer.

    def _open(self, call: OpenTransfer) -> TransferTask:
        self._close_receiver()
        info = {**self._init_defaults, **call.init_info}
        self._backend = backend = str(info.get("backend") or default_backend(self._device))
        self._position = ReceiverPosition(call.first_rank + self._rank, self._device)
        self._receiver = receiver = open_receiver(backend, info, self._position, self._timeout)
        self._on_open()
        return self._run(f"weights-{backend}", lambda task: receiver.connect(), is_collective=backend not in GROUPLESS)

    def _close_receiver(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _receiver_for(self, update_info: Mapping[str, Any]) -> tuple[str, WeightReceiver]:
        """Return the backend of an update with its receiver. Backends without a group need not have been opened."""
        named = str(update_info.get("backend") or self._backend or self._init_defaults.get("backend") or "")
        if "weight_dir" in update_info:
            named = "disk"
        if named in GROUPLESS and not (self._receiver is not None and self._backend == named):
            return named, open_receiver(named, self._init_defaults, self._position, self._timeout)
        if self._receiver is None or named != self._backend:
            raise TransferBroken(
                f"there is no group with the trainer{f' of backend {named}' if named else ''}: call "
                "init_weight_transfer_engine first"
            )
        return named, self._receiver

    # The update.

    def _start(self, call: StartUpdate) -> None:
        self._drop()
        self._update = OpenUpdate(call.number, call.is_in_place, self._start_staging(in_place=call.is_in_place))

    def _drop(self) -> None:
        update, self._update = self._update, None
        if update is not None:
            update.is_broken = True
            update.staged.drop()

    def _receive(self, call: ReceiveTensors) -> TransferTask:
        update = self._update
        if update is None:
            raise WrongState("no weight update is open: call start_weight_update first")
        if update.is_broken:
            raise WrongState(f"receiving weight update {update.number} was broken off: start another")
        directory = None if call.weight_dir is None else self._locate(call.weight_dir)
        update_info = self._own_info(call.update_info) if directory is None else {"weight_dir": directory}
        backend, receiver = self._receiver_for(update_info)
        if update.is_in_place:
            self._replace_weights(None)

        def receive(task: TransferTask) -> None:
            try:
                if directory is not None:
                    task.fingerprint = check_fingerprint(directory, call.fingerprint)
                for bucket in receiver.receive(update_info, lambda sent: check_tensors(update.staged, sent)):
                    if update.is_broken:
                        raise TransferBroken(f"weight update {update.number} was dropped while it was received")
                    update.staged.add(bucket)
                    task.num_tensors += len(bucket)
                    task.num_bytes += sum(tensor.nbytes for _, tensor in bucket)
                if self._device.type == "cuda":  # the trainer may overwrite its memory after the reply
                    torch.cuda.current_stream(self._device).synchronize()
            except BaseException:
                update.is_broken = True
                receiver.close()
                raise

        return self._run(f"weights-{backend}", receive, is_collective=backend not in GROUPLESS)

    def _own_info(self, packed: bytes) -> Mapping[str, Any]:
        """Return this worker's `update_info`."""
        info = unpack(packed)
        if isinstance(info, list) and self._rank < len(info):
            info = info[self._rank]
        if not isinstance(info, dict):
            raise InvalidRequest(
                f"`update_info` must be an object, or a list of one for each worker, but it is a {type(info).__name__}",
                param="update_info",
            )
        return info

    def _check(self, require_complete: bool) -> UpdateChecked:
        try:
            return UpdateChecked(missing=self._find_missing(require_complete))
        except Exception as error:
            self._break_off()
            return UpdateChecked(failure=Failure.of(error))

    def _find_missing(self, require_complete: bool) -> list[str]:
        """Return the names of weights that stay as they are. Raises an error if the update cannot be applied."""
        update = self._update
        if update is None:
            raise WrongState("no weight update is open")
        if update.is_broken or (self._task is not None and not self._task.is_done):
            raise WrongState(f"weight update {update.number} was not received completely: start another")
        if incomplete := sorted(update.staged.missing()):
            raise WeightsMismatch(
                f"weight update {update.number} lacks {_shown(incomplete)}: tensors that are packed together must all "
                "come"
            )
        missing = sorted(update.staged.untouched())
        if require_complete and missing:
            raise WeightsMismatch(
                f"weight update {update.number} must have every weight, but {_shown(missing)} is missing"
            )
        return missing

    @torch.inference_mode()
    def _apply(self, number: int) -> bool:
        update = self._update
        if update is None or update.number != number or update.is_broken:
            return False
        self._replace_weights(None)  # until it is done
        update.staged.apply()
        self._number = number
        self._drop()
        return True

    # Weights of other engines.

    def _serve(self, call: ServeStorage) -> StorageServed:
        storage = self._storage
        try:
            if storage is None or self._number != call.number:
                raise WrongState(f"this worker has weights of update {self._number}, not of {call.number}")
            if not storage.is_readable():
                raise WrongState("the weights of this worker are asleep")
            offer = StorageOffer(
                storage,
                call.number,
                host=storage.host if storage.host != LOOPBACK or call.host is None else call.host,
                timeout=call.timeout,
            )
        except Exception as error:
            return StorageServed(failure=Failure.of(error))
        self._offers = [*(one for one in self._offers if one.is_open), offer]
        return StorageServed(handle=offer.handle)

    def _fetch(self, call: FetchStorage) -> TransferTask:
        storage = self._storage
        if storage is None:
            raise WrongState("this worker cannot fetch weights")
        self._drop()
        self._replace_weights(None)
        header, tensors = storage.header(call.number), storage.tensors()

        fetch = StorageFetch(call.handles[self._rank], tensors, header, timeout=call.timeout)

        def run(task: TransferTask) -> None:
            task.num_bytes = fetch.run()
            task.num_tensors = len(tensors)
            self._number = call.number

        return self._run("weights-fetch", run, is_collective=False, close=fetch.close)

    def on_weights_sleep(self, *, are_kept: bool) -> None:
        """Break off what other engines fetch, before the memory of the weights is released."""
        self._replace_weights(self._number if are_kept else None)

    def _replace_weights(self, number: int | None) -> None:
        """Note that the weights change, or their memory, and whose they are from now on."""
        self._number = number
        for offer in self._offers:
            offer.close()
        self._offers.clear()

    def _attempt(self, action: Callable[[], None]) -> Failure | None:
        try:
            action()
        except Exception as error:
            return Failure.of(error)
        return None


def _shown(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return f"{', '.join(names[:SHOWN_NAMES])}{more}"
