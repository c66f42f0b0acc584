"""Moves frames between processes. Knows no message: what to encode and decode with is handed in."""

from eagleray.transport.broadcast import Broadcaster
from eagleray.transport.endpoint import (
    check_room,
    make_runtime_dir,
    no_room,
    remove_dead_sockets,
    remove_runtime_dir,
)
from eagleray.transport.listener import FAR_MEDIA, MEDIA, Listener
from eagleray.transport.pulse import Pulse, PulseMonitor
from eagleray.transport.socket import AsyncInbox, Inbox, Outbox

__all__ = [
    "FAR_MEDIA",
    "MEDIA",
    "AsyncInbox",
    "Broadcaster",
    "Inbox",
    "Listener",
    "Outbox",
    "Pulse",
    "PulseMonitor",
    "check_room",
    "make_runtime_dir",
    "no_room",
    "remove_dead_sockets",
    "remove_runtime_dir",
]
