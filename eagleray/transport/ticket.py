"""What a worker needs to attach to the queue, whatever brings it to life."""

from __future__ import annotations

import msgspec

from eagleray.transport.contact import Contact
from eagleray.transport.shared import SharedTicket

__all__ = ["Ticket"]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    peer: int
    secret: bytes
    window: int
    """Bytes that may be under way on a connection."""
    contact: Contact
    shared: SharedTicket | None
    """None: the engine's machine has no memory to share."""
