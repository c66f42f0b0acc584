"""Messages by which the number of engines and API servers changes, and engines are restarted on purpose.

A client sends one of these requests in a `ControlCall`. The supervisor executes one operation at a time, also when the
caller disappears, and answers with `ControlReturned` when it has ended. Before an engine leaves on purpose, clients may
be sent `Draining`; each replies with `Drained` when none of its requests runs on that engine.
"""

from __future__ import annotations

import msgspec

from eagleray.identity import ClientId, EngineId


class Scale(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run this number of engines and API servers from now on. None leaves a number as it is."""

    num_engines: int | None = None
    """Number of engines of the instance."""
    remove_ranks: tuple[int, ...] = ()
    """Ranks that go. Without them the highest ranks go when the number gets smaller."""
    num_api_servers: int | None = None
    drain_timeout: float = 0.0
    """Seconds for which an engine that goes may finish its requests. What runs then moves to other engines."""


class RestartEngines(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace the engines by new processes, one after another."""

    ranks: tuple[int, ...] = ()
    """Ranks to restart; empty for all."""
    drain_timeout: float = 0.0
    """See `Scale.drain_timeout`."""


class GetScaling(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Report an operation. Answered at once."""

    operation_id: str | None = None
    """None: the one that runs, or else the last one."""


FleetRequest = Scale | RestartEngines | GetScaling


class Draining(msgspec.Struct, frozen=True, tag=True):
    """The engine is going to leave: it is to get no new requests while there is another engine."""

    engine: EngineId


class Drained(msgspec.Struct, frozen=True, tag=True):
    """The client has no requests on the engine of which it received `Draining`."""

    client: ClientId
    engine: EngineId
