"""Identities, and every name that is derived from them.

The name of a process, a socket or a log prefix is a pure function of an identity, so two processes of a kind never
claim the same name. An identity contains its incarnation: a restarted engine has the same rank and the next number.
"""

from __future__ import annotations

import secrets
from typing import ClassVar, TypeVar

import msgspec

SEPARATOR = "@"
"""Separates a given instance name, which must not contain it, from the random part."""

FIRST_WEIGHT_VERSION = "default"
"""Version of the weights of the checkpoint."""

Member = TypeVar("Member", bound="EngineId | ClientId")


class EngineId(msgspec.Struct, frozen=True, tag="engine"):
    """An engine of one instance; `rank` is its data-parallel rank over the whole deployment."""

    instance: str
    rank: int
    incarnation: int = 0

    @property
    def label(self) -> str:
        """Short name for log prefixes and process titles."""
        return f"engine-{self.rank}" + (f".{self.incarnation}" if self.incarnation else "")


class ClientId(msgspec.Struct, frozen=True, tag="client"):
    """A sender of requests to engines: an API server, the `LLM` object of a program, or an external program."""

    instance: str
    index: int
    incarnation: int = 0

    @property
    def label(self) -> str:
        return f"client-{self.index}" + (f".{self.incarnation}" if self.incarnation else "")


class WorkerId(msgspec.Struct, frozen=True, tag="worker"):
    """A worker of an engine, by its tensor-parallel and pipeline-parallel ranks."""

    engine: EngineId
    tp: int = 0
    pp: int = 0

    @property
    def label(self) -> str:
        return f"{self.engine.label}/tp{self.tp}-pp{self.pp}"


class DriverId(msgspec.Struct, frozen=True, tag="driver"):
    """A process that drives Ray for one instance. All incarnations have the same label."""

    instance: str
    incarnation: int = 0
    label: ClassVar[str] = "ray-driver"


class SupervisorId(msgspec.Struct, frozen=True, tag="supervisor"):
    """The supervisor, as a peer of a member: each member has one, so the identity has no fields."""

    label: ClassVar[str] = "supervisor"


SUPERVISOR = SupervisorId()

FIRST_EXTERNAL_INDEX = 1_000_000
"""Index of the first external client; API servers have smaller ones."""

MemberId = EngineId | ClientId

ProcessId = EngineId | ClientId | WorkerId | DriverId
"""Identity of anything that is spawned as a process or created as an actor."""


def next_incarnation(member: Member) -> Member:
    """Return the identity of the member that replaces `member`."""
    return msgspec.structs.replace(member, incarnation=member.incarnation + 1)


def replica_key(member: Member) -> Member:
    """Return the key of the member's replica, which is the same for all incarnations."""
    return msgspec.structs.replace(member, incarnation=0)


def new_instance_name(given: str | None = None) -> str:
    """Return a unique name for an instance that is starting; it begins with the name that the user has `given`.

    The random part keeps messages and actors of an earlier instance of the same given name apart from this one's.
    """
    unique = secrets.token_hex(4)
    return unique if given is None else f"{given}{SEPARATOR}{unique}"


def display_name(instance: str) -> str:
    """Return the given name of an instance, or its unique name if none was given."""
    return instance.partition(SEPARATOR)[0]


def cluster_name(instance: str, label: str) -> str:
    """Return the name of an actor or a placement group in the instance's namespace of a Ray cluster."""
    return f"{display_name(instance)}/{label}"
