"""What the client needs of a transport: one inbox, one outbox."""

from __future__ import annotations

from typing import Literal, Protocol

from eagleray.identity import MemberId
from eagleray.messages.lifecycle import MemberToSupervisor, SupervisorToMember
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine


class Inbox(Protocol):
    """Where messages for this client arrive; bound before the client is made."""

    address: str

    async def receive(self) -> SupervisorToMember | EngineToClient:
        """The next message. Raises `ChannelClosed` once the inbox is closed."""

    def close(self) -> None: ...


class Outbox(Protocol):
    """Reaches the inboxes of engines and of the supervisor."""

    def connect(self, peer: MemberId | Literal["supervisor"], address: str) -> None: ...

    def disconnect(self, peer: MemberId | Literal["supervisor"]) -> None: ...

    def send(self, peer: MemberId | Literal["supervisor"], message: ClientToEngine | MemberToSupervisor) -> None:
        """Never blocks."""

    def take_broken(self) -> list[MemberId | Literal["supervisor"]]:
        """Those whose connections have broken since the last call: what was sent may be lost."""

    def close(self) -> None: ...
