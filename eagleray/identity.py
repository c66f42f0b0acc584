"""Who is who: identities, and every name that is derived from them.

A name of a process, a peer or a log line is a pure function of an identity, so two of a kind can never claim the same
one, whichever path created them. An identity carries its incarnation: a restarted engine is the same engine, later.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

import msgspec

__all__ = ["ClientId", "EngineId", "PeerId", "WorkerId", "new_instance_name", "successor"]

Peer = TypeVar("Peer", bound="EngineId | ClientId")


class EngineId(msgspec.Struct, frozen=True, tag="engine"):
    """One data-parallel rank of one instance; `rank` is always the global rank."""

    instance: str
    rank: int
    incarnation: int = 0

    @property
    def label(self) -> str:
        """The short name for people: log prefixes and process titles."""
        return f"engine-{self.rank}" + (f".{self.incarnation}" if self.incarnation else "")


class ClientId(msgspec.Struct, frozen=True, tag="client"):
    """One user of the engines: an API server, or the `LLM` object of a program."""

    instance: str
    index: int
    incarnation: int = 0

    @property
    def label(self) -> str:
        return f"client-{self.index}" + (f".{self.incarnation}" if self.incarnation else "")


class WorkerId(msgspec.Struct, frozen=True, tag="worker"):
    """One worker of an engine: its place in the tensor-parallel and pipeline-parallel groups."""

    engine: EngineId
    tp: int = 0
    pp: int = 0

    @property
    def label(self) -> str:
        return f"{self.engine.label}/tp{self.tp}-pp{self.pp}"


PeerId = EngineId | ClientId


def successor(member: Peer) -> Peer:
    """The next incarnation of `member`."""
    return msgspec.structs.replace(member, incarnation=member.incarnation + 1)


def new_instance_name() -> str:
    """A name that no other instance on this cluster has."""
    return secrets.token_hex(4)
