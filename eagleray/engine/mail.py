"""What comes into an engine and what leaves it."""

from __future__ import annotations

from eagleray.identity import PeerId
from eagleray.messages.lifecycle import MemberToSupervisor, SupervisorToEngine
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.waves import EngineToEngine
from eagleray.transport import Inbox, Outbox

__all__ = ["SUPERVISOR", "EngineInbox", "EngineMail", "EngineOutbox"]

EngineMail = SupervisorToEngine | ClientToEngine | EngineToEngine
EngineInbox = Inbox[EngineMail]
EngineOutbox = Outbox[PeerId | str, EngineToClient | MemberToSupervisor | EngineToEngine]

SUPERVISOR = "supervisor"
"""Its name in an engine's outbox; it has no identity."""
