"""Who is in the fleet. Published by the supervisor, believed by everybody."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from eagleray.identity import MemberId
from eagleray.messages.arrays import Array


class RoutingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Of an engine that can say which experts computed a token."""

    num_layers: int
    """That have experts."""
    num_experts: int
    top_k: int

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of experts' numbers: the smallest that holds them all."""
        return np.dtype(np.uint8 if self.num_experts <= 256 else np.uint16)

    @property
    def row_bytes(self) -> int:
        """What the experts of one token take."""
        return self.num_layers * self.top_k * self.dtype.itemsize

    def rows(self, experts: bytes | bytearray) -> Array:
        """[num_tokens, num_layers, top_k], read-only if `experts` is; it shares their memory."""
        return np.frombuffer(experts, self.dtype).reshape(-1, self.num_layers, self.top_k)


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What clients must know of an engine."""

    architecture: str
    vocab_size: int
    max_model_len: int
    """Longest sequence, prompt and output together, in tokens."""
    block_size: int
    """Tokens of one cache block."""
    num_kv_blocks: int
    has_experts: bool = False
    routing: RoutingInfo | None = None
    """None: requests cannot ask for routed experts."""


class Joined(msgspec.Struct, frozen=True, tag=True):
    """This member can be reached here. `engine` is set for engines only."""

    member: MemberId
    address: str
    engine: EngineInfo | None = None


class Left(msgspec.Struct, frozen=True, tag=True):
    """This member is gone, and why."""

    member: MemberId
    cause: str
    returns: bool = True
    """A successor of it is on its way. False: it was given up, or the instance ends."""
    engine: EngineInfo | None = None
    """What is served by such an engine, told to those who come while it is missing: they never met it."""
