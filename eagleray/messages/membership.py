"""Members of the fleet, as the supervisor publishes them to all members."""

from __future__ import annotations

import os
import platform
from typing import Any

import msgspec
import numpy as np

from eagleray.config.pooling_spec import PoolingSpec
from eagleray.identity import MemberId
from eagleray.messages.arrays import Array


class RoutingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Shape of the routed experts that an engine reports."""

    num_layers: int
    """Number of layers that have experts."""
    num_experts: int
    top_k: int
    layers: tuple[int, ...] = ()
    """Indices of these layers in the model."""
    num_model_layers: int = 0
    """Number of layers of the model, with those that have no experts."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """Smallest type that holds every expert's number."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """Bytes that the experts of one token take."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def rows(self, experts: bytes | bytearray) -> Array:
        """Return a view of `experts`, [num_tokens, num_layers, top_k], which is read-only if `experts` is."""
        return np.frombuffer(experts, self.dtype).reshape(-1, self.num_layers, self.top_k)


class ProcessInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The process of an engine or of a worker."""

    host: str
    """Name of its host."""
    pid: int

    @classmethod
    def current(cls) -> ProcessInfo:
        """Return the info of the calling process."""
        return cls(host=platform.node(), pid=os.getpid())


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of an engine that clients need."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    block_size: int
    """Tokens of one cache block."""
    num_kv_blocks: int
    has_experts: bool = False
    pooling: PoolingSpec | None = None
    """Description of a pooling model; None for a model that generates."""
    hidden_size: int = 0
    """Number of features of an embedding."""
    routing: RoutingInfo | None = None
    """None if requests cannot ask for routed experts."""
    cache_bytes: int = 0
    """Size of the caches of all its workers."""
    process: ProcessInfo | None = None
    workers: tuple[ProcessInfo, ...] = ()
    """Processes of the workers, in order of rank; several workers may be threads of one."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """A member is present and can be reached at `address`. `engine` is set for engines only."""

    member: MemberId
    address: str
    engine: EngineInfo | None = None
    time: float = 0.0
    """Unix time at which the supervisor published this, in seconds."""


class Left(msgspec.Struct, frozen=True, tag=True):
    """A member is no longer present, because of `cause`."""

    member: MemberId
    cause: str
    returns: bool = True
    """Whether a replacement follows; False if the member was given up or removed, or the instance ends."""
    engine: EngineInfo | None = None
    """Properties of the missing engine, in `Attach.missing` only, for members that join while it is missing."""
    time: float = 0.0
    """Unix time at which the supervisor published this, in seconds."""
    is_planned: bool = False
    """Whether the member was told to go, so that its requests move without being charged for its exit."""
