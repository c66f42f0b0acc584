"""Messages by which the number of engines and API servers changes, and engines are restarted on purpose.

A client sends one of these requests in a `ControlCall`. The supervisor executes one operation at a time, also when the
caller disappears, and answers with `ControlReturned` when it has ended. Before an engine leaves on purpose, clients may
be sent `Draining`; each replies with `Drained` when none of its requests runs on that engine.
"""

from __future__ import annotations

from typing import Any

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
    """Replace the engines by new processes, one after another, with one more engine meanwhile if there is room."""

    ranks: tuple[int, ...] = ()
    """Ranks to restart; empty for all."""
    drain_timeout: float = 0.0
    """See `Scale.drain_timeout`."""
    options: dict[str, Any] = {}
    """Options that engines have from now on, by name; None stands for the default of an option."""


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


class EngineLoadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Load of an engine as a client knows it."""

    engine: EngineId
    num_running: int
    """Sequences that are computed."""
    num_waiting: int
    """Sequences that would be admitted if there were room."""
    cache_usage: float
    """Fraction of the cache blocks in use, between 0 and 1."""
    num_prompt_tokens: int
    """Prompt tokens that this incarnation of the engine has computed."""
    num_generation_tokens: int
    """The same for generated tokens."""


class LoadReport(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load of a client and of the engines, sent once a second if the number of engines follows it (`autoscale`)."""

    client: ClientId
    engines: list[EngineLoadReport]
    """The engines that have joined."""
    num_unassigned: int = 0
    """Sequences of requests that wait in this client for an engine."""
    num_first_tokens: int = 0
    """Requests that got their first token since the last report. This and the next two numbers are about requests that
    have arrived since the newest engine joined, because that engine could not help earlier ones."""
    num_late: int = 0
    """Number of these requests whose first token came later than `autoscale_target_ttft` seconds after arrival."""
    num_overdue: int = 0
    """Requests without a token that arrived longer ago than that."""
