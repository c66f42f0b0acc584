"""A client on the wires of an instance: what an API server and `LLM` begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from eagleray.client.client import Client
from eagleray.config.sections import Config
from eagleray.identity import ClientId, MemberId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import MemberToSupervisor, SupervisorToMember
from eagleray.messages.outputs import EngineToClient
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX
from eagleray.transport.inbox import AsyncInbox, Outbox


def open_client(
    client_id: ClientId,
    config: Config,
    runtime_dir: Path,
    *,
    host: str | None = None,
) -> Client:
    """A client whose inbox is bound, in the running event loop.

    `host`: the address of this host that engines of other hosts reach; None: there are none. Raises what
    `Client.create` raises.
    """
    decode = Codec[SupervisorToMember | EngineToClient](CLIENT_INBOX).decode
    inbox = AsyncInbox(runtime_dir, client_id.label, decode, host=host)
    outbox: Outbox[MemberId | Literal["supervisor"], ClientToEngine | MemberToSupervisor] = Outbox(
        Codec[ClientToEngine | MemberToSupervisor](CLIENT_OUTBOX).encode
    )
    try:
        return Client.create(client_id, config, inbox=inbox, outbox=outbox)
    except BaseException:
        inbox.close()
        raise
