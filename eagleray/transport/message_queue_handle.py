"""Handle with which a worker attaches to the queue, the same for every executor."""

from __future__ import annotations

import msgspec

from eagleray.transport.router_dealer import SocketAddress
from eagleray.transport.shared_rings import SharedRingsHandle


class MessageQueueHandle(msgspec.Struct, frozen=True, kw_only=True):
    peer: int
    secret: bytes
    window: int
    """Bytes that may be in flight on a connection."""
    contact: SocketAddress
    shared: SharedRingsHandle | None
    """Handle of the shared memory; None if the engine's machine does not support it."""
