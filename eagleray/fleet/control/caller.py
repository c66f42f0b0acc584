"""A caller of an operation, which is answered at the end of the operation or at its own deadline."""

from __future__ import annotations

from dataclasses import dataclass

from eagleray.identity import ClientId


@dataclass
class Caller:
    client: ClientId
    call_id: int
    deadline: float
    """Time by which the caller is answered, in seconds of a monotonic clock."""
