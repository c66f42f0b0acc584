"""Moves frames between processes. Knows no message: what to encode and decode with is handed in."""

from eagleray.transport.endpoint import make_runtime_dir, remove_runtime_dir
from eagleray.transport.socket import AsyncInbox, Inbox, Outbox

__all__ = ["AsyncInbox", "Inbox", "Outbox", "make_runtime_dir", "remove_runtime_dir"]
