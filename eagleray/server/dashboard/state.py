"""The document of /dashboard/state: the instance at one moment, as the page and `eagleray top` show it.

It contains structs only; `rows.py` and `feed.py` fill them.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MemberState = Literal["starting", "serving", "restarting", "gone"]
UnixTime = Annotated[float, Meta(description="Unix time in seconds.")]


class LatencySummary(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the requests of the last minute; null without requests."""

    count: Annotated[int, Meta(description="Number of measured requests or completions.")] = 0
    mean: float | None = None
    p50: Annotated[float | None, Meta(description="Estimated from the buckets of the histogram of /metrics.")] = None
    p95: Annotated[float | None, Meta(description="Estimated in the same way.")] = None


class Traffic(msgspec.Struct, frozen=True, kw_only=True):
    """The work of all engines and API servers together. Rates are null until a second has been observed."""

    num_in_flight: Annotated[int, Meta(description="Requests that API servers have not answered.")]
    num_running: Annotated[int, Meta(description="Sequences that engines compute.")]
    num_waiting: Annotated[int, Meta(description="Sequences that wait in engines.")]
    requests_per_second: Annotated[float | None, Meta(description="Completions that ended, over some seconds.")]
    prompt_tokens_per_second: Annotated[float | None, Meta(description="Computed or found in the prefix cache.")]
    generation_tokens_per_second: float | None
    cache_usage: Annotated[float | None, Meta(description="Part of the KV cache in use; 1 is all.")]
    cache_hits: Annotated[
        float | None, Meta(description="Part of the prompt tokens of the last minute that the prefix cache had.")
    ]
    time_to_first_token: LatencySummary
    time_per_output_token: LatencySummary


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    label: Annotated[str, Meta(description="Position among the workers of the engine, such as tp1-pp0.")]
    state: MemberState
    host: str | None
    pid: Annotated[int | None, Meta(description="Process, while the engine serves.")]


class EngineRow(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    label: Annotated[str, Meta(description="Name in the log: rank, and number of the restart.")]
    state: MemberState
    since: Annotated[UnixTime | None, Meta(description="Time of the last change of `state`; null while it starts.")]
    restarts: int
    cause: Annotated[str | None, Meta(description="Cause of the last exit, unless the engine serves.")]
    host: Annotated[str | None, Meta(description="Host of the present incarnation, or of the one before.")]
    pid: int | None
    workers: list[WorkerRow]
    num_running: int
    num_waiting: int
    cache_usage: float | None
    prompt_tokens_per_second: float | None
    generation_tokens_per_second: float | None


class ApiServerRow(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    label: str
    state: MemberState
    since: UnixTime | None
    restarts: int
    cause: str | None
    pid: int | None
    num_in_flight: Annotated[int, Meta(description="Requests that this server has not answered.")]


class NodeRow(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    engines: Annotated[list[str], Meta(description="Labels of the engines that serve there.")]
    num_workers: Annotated[int, Meta(description="Number of workers that serve there.")]
    num_away: Annotated[int, Meta(description="Number of engines and workers that were there and do not serve now.")]
    num_api_servers: int


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the membership."""

    time: UnixTime
    member: str
    kind: Annotated[
        Literal["started", "left", "lost", "recovered"],
        Meta(description="`left`: it was told to go, by scaling or a restart on purpose."),
    ]
    cause: Annotated[str | None, Meta(description="Cause of the exit, for `left` and `lost`.")] = None
    returns: Annotated[bool | None, Meta(description="Whether a replacement follows, for `left` and `lost`.")] = None
    downtime: Annotated[
        float | None, Meta(description="Seconds from the exit to the replacement, for `recovered`.")
    ] = None


class ExpertHeat(msgspec.Struct, frozen=True, kw_only=True):
    """Load of the experts in the last minutes, over all engines; half of the weight is on the last 30 s of work."""

    load: Annotated[
        list[list[int]], Meta(description="By layer with experts, by expert: tokens in percent of the layer's mean.")
    ]
    balance: Annotated[list[float], Meta(description="By layer: mean over maximum of the experts' tokens; 1 is even.")]


class DashboardState(msgspec.Struct, frozen=True, kw_only=True):
    time: UnixTime
    version: str
    instance: Annotated[str, Meta(description="Name of the instance, such as that of a replica of Ray Serve.")]
    model: str
    server: Annotated[str, Meta(description="Label of the API server that answers.")]
    state: Annotated[
        Literal["serving", "paused", "sleeping", "updating", "stopping", "down"],
        Meta(description="State of the instance; down: no engine serves."),
    ]
    cause: Annotated[str | None, Meta(description="Why no engine serves; null if one does.")]
    weight_version: str
    traffic: Traffic
    engines: list[EngineRow]
    api_servers: list[ApiServerRow]
    nodes: list[NodeRow]
    events: Annotated[list[EventRow], Meta(description="Latest changes, the newest first.")]
    experts: Annotated[
        ExpertHeat | None, Meta(description="null for models without experts, and in a stream while it is the same.")
    ] = None
