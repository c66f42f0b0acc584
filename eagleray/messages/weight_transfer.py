"""Calls of an engine to its workers about weights from a trainer, and their replies.

Connecting and receiving run in a thread of the worker, so that steps go on meanwhile: `OpenTransfer` and
`ReceiveTensors` are answered at once, and `PollTransfer` asks for the outcome. Failures are values; the worker is
intact, and its weights are those from before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.messages.failure import Failure


class OpenTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to connect to the trainer. An earlier transfer is closed."""

    init_info: dict[str, Any]
    """Fields of the backend, see `eagleray.weights`."""
    first_rank: int
    """Rank of the engine's first worker among the workers of the instance."""


class StartUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Open an update. One that is open already is dropped."""

    number: int
    is_in_place: bool
    """Whether tensors are written over the weights when they come, instead of beside them."""
    num_bytes: int | None = None
    """Bytes that will come, if known."""


class ReceiveTensors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to receive tensors into the open update."""

    update_info: bytes = b""
    """Encoded by `plain.pack`: a dict, or a list with one for each worker of the engine."""
    weight_dir: str | None = None
    """Directory to read instead."""
    fingerprint: str = ""
    """Fingerprint that its files must have, see `TransferProgress`; empty if any will do."""


class PollTransfer(msgspec.Struct, frozen=True, tag=True):
    """Report the progress of what was begun last."""


class TransferProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Reply to `OpenTransfer`, `ReceiveTensors`, `FetchStorage` and `PollTransfer`."""

    is_done: bool
    """Whether nothing runs any longer: it has succeeded, or `failure` says why it has not."""
    num_tensors: int = 0
    num_bytes: int = 0
    """Tensors that were received in this call, and their bytes."""
    is_collective: bool = True
    """Whether the exit of another worker breaks the transfer."""
    fingerprint: str = ""
    """Text that changes when a file of the directory that was read is written to; empty without a directory."""
    failure: Failure | None = None


class ServeStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Offer the packed weights of this update to the same rank of another engine, once."""

    number: int
    timeout: float
    """Seconds until the other worker must have connected, and may need for one piece."""
    host: str | None = None
    """Address of the engine's host that other hosts can reach, for workers that have none of their own."""


class StorageServed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handle: bytes = b""
    """Data for `FetchStorage`."""
    failure: Failure | None = None


class FetchStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to overwrite the weights with those that another engine offers. No steps may run."""

    number: int
    handles: list[bytes]
    """Handles by rank."""
    timeout: float


class CheckUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that the open update can be applied."""

    require_complete: bool = False
    """Whether every weight of this rank must have come."""


class UpdateChecked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    missing: list[str] = []
    """Names of this rank's weights that have not come and stay as they are."""
    failure: Failure | None = None
    """Error if the update cannot be applied; it is dropped then."""


class ApplyUpdate(msgspec.Struct, frozen=True, tag=True):
    """Make the weights of the open update those of the model, between two steps."""

    number: int


class UpdateApplied(msgspec.Struct, frozen=True, tag=True):
    is_applied: bool
    """Whether this rank had an update of this number."""


class DropUpdate(msgspec.Struct, frozen=True, tag=True):
    """Drop the open update, and stop receiving."""


class CloseTransfer(msgspec.Struct, frozen=True, tag=True):
    """Leave the trainer's group, and stop receiving."""


class TransferDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to a call of this module that has no result."""

    failure: Failure | None = None


TransferCall = (
    OpenTransfer
    | StartUpdate
    | ReceiveTensors
    | PollTransfer
    | CheckUpdate
    | ApplyUpdate
    | DropUpdate
    | CloseTransfer
    | ServeStorage
    | FetchStorage
)
TransferReply = TransferProgress | UpdateChecked | UpdateApplied | TransferDone | StorageServed
