"""What a worker needs to attach to the queue, whatever brings it to life."""

from __future__ import annotations

import msgspec

from eagleray.transport.router_dealer import SocketAddress
from eagleray.transport.shared_rings import SharedRingsHandle


class MessageQueueHandle(msgspec.Struct, frozen=True, kw_only=True):
    peer: int
    secret: bytes
    window: int
    """Bytes that may be under way on a connection."""
    contact: SocketAddress
    shared: SharedRingsHandle | None
    """None: the engine's machine has no memory to share."""
