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
    """Open an update. An update that is open already is dropped."""

    number: int
    is_in_place: bool
    """Whether received tensors overwrite the weights at once, instead of being staged beside them."""


class ReceiveTensors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to receive tensors into the open update."""

    update_info: bytes = b""
    """A dict, or a list with a dict for each worker of the engine, encoded by `plain.pack`; empty with `weight_dir`."""
    weight_dir: str | None = None
    """Directory to read the tensors from."""
    fingerprint: str = ""
    """Fingerprint that the files of the directory must have, see `TransferProgress`; empty if any will do."""


class PollTransfer(msgspec.Struct, frozen=True, tag=True):
    """Report the progress of the last `OpenTransfer`, `ReceiveTensors` or `FetchStorage`."""


class TransferProgress(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Reply to `OpenTransfer`, `ReceiveTensors`, `FetchStorage` and `PollTransfer`."""

    is_done: bool
    """Whether the call has ended: it has succeeded unless `failure` is set."""
    num_tensors: int = 0
    """Number of tensors that this call has received."""
    num_bytes: int = 0
    """Size of these tensors."""
    is_collective: bool = True
    """Whether the exit of another worker breaks the transfer."""
    fingerprint: str = ""
    """Text that changes when a file of the directory is written to; empty without a directory."""
    failure: Failure | None = None


class ServeStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Offer the packed weights of this update to the same rank of another engine, once."""

    number: int
    timeout: float
    """Time limit, in seconds, for the other worker to connect, and for each piece that is sent."""
    host: str | None = None
    """Address of the engine's host that other hosts can reach, for workers without an address of their own."""


class StorageServed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    handle: bytes = b""
    """Data for `FetchStorage`."""
    failure: Failure | None = None


class FetchStorage(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin to overwrite the weights with the weights that another engine offers. No steps may run."""

    number: int
    handles: list[bytes]
    """Handles by rank."""
    timeout: float


class CheckUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that the open update can be applied."""

    require_complete: bool = False
    """Whether the update must contain every weight of this rank."""


class UpdateChecked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    missing: list[str] = []
    """Names of this rank's weights that the update does not change."""
    failure: Failure | None = None
    """Error if the update cannot be applied."""


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
