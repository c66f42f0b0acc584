"""Types of an engine's inbox and outbox."""

from __future__ import annotations

from eagleray.identity import MemberId, SupervisorId
from eagleray.messages.lifecycle import MemberToSupervisor, SupervisorToEngine
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.waves import EngineToEngine
from eagleray.transport.inbox import Inbox, Outbox

EngineMessage = SupervisorToEngine | ClientToEngine | EngineToEngine
EngineInbox = Inbox[EngineMessage]
EngineOutbox = Outbox[MemberId | SupervisorId, EngineToClient | MemberToSupervisor | EngineToEngine]
