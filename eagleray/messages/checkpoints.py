"""Messages by which a client fetches the checkpoint that engines are restarted with."""

from __future__ import annotations

from typing import Any

import msgspec

from eagleray.identity import ClientId
from eagleray.messages.failure import Failure


class FetchCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Request to one of the instance's own clients: find or download the checkpoint that a restart names, and compare
    it with that of the start."""

    operation_id: str
    options: dict[str, Any]
    """Those of `RestartEngines`."""


class CheckpointFetched(msgspec.Struct, frozen=True, tag=True):
    """The reply to `FetchCheckpoint`."""

    client: ClientId
    operation_id: str
    options: dict[str, Any] = {}
    """The options with the checkpoint that was found."""
    failure: Failure | None = None
    """Why there is none, or why it does not fit; else None."""
