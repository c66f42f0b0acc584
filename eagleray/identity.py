"""Who is who: identities, and every name that is derived from them.

A name of a process, a peer or a log line is a pure function of an identity, so two of a kind can never claim the same
one, whichever path created them. An identity carries its incarnation: a restarted engine is the same engine, later.
"""

from __future__ import annotations

import secrets
from typing import ClassVar, TypeVar

import msgspec

SEPARATOR = "@"
"""Not in a name that is given."""

Member = TypeVar("Member", bound="EngineId | ClientId")


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


class DriverId(msgspec.Struct, frozen=True, tag="driver"):
    """The process that drives Ray for one instance."""

    instance: str
    incarnation: int = 0
    label: ClassVar[str] = "ray-driver"


class SupervisorId(msgspec.Struct, frozen=True, tag="supervisor"):
    """The supervisor of the instance that a member belongs to, as the other end of the member's connection to it."""

    label: ClassVar[str] = "supervisor"


SUPERVISOR = SupervisorId()

MemberId = EngineId | ClientId

ProcessId = EngineId | ClientId | WorkerId | DriverId
"""Whatever is spawned as a process or created as an actor."""


def successor(member: Member) -> Member:
    """The next incarnation of `member`."""
    return msgspec.structs.replace(member, incarnation=member.incarnation + 1)


def new_instance_name(given: str | None = None) -> str:
    """The name of an instance that is starting: no other has it, now or later. It begins with the one that is `given`.

    What an earlier instance of the same given name has left on its way is thus not taken for this one's.
    """
    unique = secrets.token_hex(4)
    return unique if given is None else f"{given}{SEPARATOR}{unique}"


def display_name(instance: str) -> str:
    """Return the name of an instance for people: the one that was given, or else its unique name."""
    return instance.partition(SEPARATOR)[0]


def cluster_name(instance: str, label: str) -> str:
    """The name of an actor or a placement group in the instance's namespace of a Ray cluster."""
    return f"{display_name(instance)}/{label}"
