"""A client on this host's wires: what an API server and `LLM` begin with."""

from __future__ import annotations

from pathlib import Path

from eagleray.client.client import Client
from eagleray.config import Config
from eagleray.identity import ClientId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import MemberToSupervisor, SupervisorToMember
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX
from eagleray.transport import AsyncInbox, Outbox

__all__ = ["open_client"]


def open_client(client_id: ClientId, config: Config, runtime_dir: Path) -> Client:
    """A client whose inbox is bound, in the running event loop. Raises what `Client.create` raises."""
    inbox = AsyncInbox(runtime_dir, client_id.label, Codec[SupervisorToMember | EngineToClient](CLIENT_INBOX).decode)
    outbox: Outbox[object, ClientToEngine | MemberToSupervisor] = Outbox(
        Codec[ClientToEngine | MemberToSupervisor](CLIENT_OUTBOX).encode
    )
    try:
        return Client.create(client_id, config, inbox=inbox, outbox=outbox)
    except BaseException:
        inbox.close()
        raise
