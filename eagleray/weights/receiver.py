"""Interface of the backends at a worker, and the choice of one by its name.

A backend is a module with `open_receiver`. Installed packages add others by entry points of the group
`eagleray.weight_transfer`, whose objects are functions with the same arguments.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, Protocol, TypeVar, cast

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from eagleray.errors import InvalidRequest, TransferBroken
from eagleray.weights.gloo_group import GROUP_NAME
from eagleray.weights.tensors import SentTensor

Fields = TypeVar("Fields", bound=msgspec.Struct)

Port = Annotated[int, Meta(ge=1, le=65535)]
Positive = Annotated[int, Meta(ge=1)]

BACKENDS = ("gloo", "nccl", "torch_nccl", "shm", "ipc", "disk")
"""Backends of this package; the module of each has its name."""
GROUPLESS = ("shm", "ipc", "disk")
"""Backends that need no `init_info`."""
ENTRY_POINTS = "eagleray.weight_transfer"


class GroupInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of `init_info` for a group of torch.distributed, whose store the trainer has."""

    master_address: str
    master_port: Port
    world_size: int
    """Number of ranks, with the trainer."""
    rank_offset: int = 1
    """Rank of the first worker of the instance."""
    group_name: str = GROUP_NAME


NamedTensors = list[tuple[str, Tensor]]

CheckTensors = Callable[[Sequence[SentTensor]], None]
"""Raises `WeightsMismatch` if the model has no place for one of the tensors."""


@dataclass(frozen=True, slots=True)
class ReceiverPosition:
    """Position of a worker among all that receive the same weights."""

    rank: int
    """Number of the worker in the instance: data-parallel rank x workers of an engine + rank in its engine."""
    device: torch.device


class WeightReceiver(Protocol):
    """A worker's end of a transfer. Used by one thread, except for `close`."""

    def connect(self) -> None:
        """Return when all ranks are connected. Raises `DeadlineExceeded` if some are missing, `TransferBroken` if the
        receiver is closed meanwhile."""
        ...

    def receive(self, update_info: Mapping[str, Any], check: CheckTensors) -> Iterator[NamedTensors]:
        """Yield the tensors that `update_info` describes, in buckets of names and whole tensors, on any device. A
        bucket may be overwritten when the next one is requested.

        Calls `check` before anything is received. If that raises, or the consumer does, the group is closed, so that
        the trainer does not wait for this rank. Raises `WeightsMismatch`, `NotFound`, or `TransferBroken`.
        """
        ...

    def close(self) -> None:
        """Leave the group, from any thread. Idempotent."""
        ...


OpenReceiver = Callable[[Mapping[str, Any], ReceiverPosition, float], WeightReceiver]
"""Makes a receiver, given `init_info`, the position of the worker and the time limit, in seconds, of each wait."""


def open_receiver(
    backend: str, init_info: Mapping[str, Any], position: ReceiverPosition, timeout: float
) -> WeightReceiver:
    """Return the worker's end of a transfer, not connected yet. Raises `InvalidRequest` for a wrong `init_info`, an
    unknown backend, or one that does not work on the device."""
    return _find(backend)(init_info, position, timeout)


def check_rank(backend: str, rank: int, world_size: int) -> int:
    """Return `rank`. Raises `InvalidRequest` unless it is the rank of a worker in a group of `world_size` ranks."""
    if not 1 <= rank < world_size:
        raise InvalidRequest(
            f"init_info of backend {backend}: a worker would have rank {rank} in a group of `world_size` {world_size}; "
            "rank 0 is the trainer, workers follow from `rank_offset`, and `world_size` counts all of them",
            param="init_info",
        )
    return rank


def check_group(update_info: Mapping[str, Any], name: str) -> None:
    """Raise `TransferBroken` if an update is for another group than `name`."""
    given = update_info.get("group_name", name)
    if given != name:
        raise TransferBroken(
            f"the workers are in the group {name!r}, but the update is for {str(given)[:80]!r}: an instance is in one "
            "group at a time, so open that group again, or send all weights in one"
        )


def default_backend(device: torch.device) -> str:
    """Return the backend that is used if neither the configuration nor `init_info` names one."""
    return "nccl" if device.type == "cuda" else "gloo"


def read_fields(backend: str, what: str, fields: Mapping[str, Any], kind: type[Fields]) -> Fields:
    """Convert `fields` to a struct. Raises `InvalidRequest` that names the field."""
    try:
        return msgspec.convert(dict(fields), kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        field = f"`{where.rstrip('`')}`: " if where else ""
        raise InvalidRequest(f"{what} of backend {backend}: {field}{text[0].lower()}{text[1:]}", param=what) from None


def _find(backend: str) -> OpenReceiver:
    if backend in BACKENDS:
        return cast(OpenReceiver, importlib.import_module(f"eagleray.weights.{backend}").open_receiver)
    others = entry_points(group=ENTRY_POINTS)
    for entry_point in others:
        if entry_point.name == backend:
            return cast(OpenReceiver, entry_point.load())
    known = ", ".join([*BACKENDS, *sorted(others.names)])
    raise InvalidRequest(f"there is no weight transfer backend {backend!r:.50}; there are {known}", param="backend")
