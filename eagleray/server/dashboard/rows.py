"""Rows of the document from the membership and the reports of the engines. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

from eagleray.identity import FIRST_EXTERNAL_INDEX, ClientId, EngineId, MemberId, replica_key
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.outputs import EngineStats
from eagleray.server.dashboard.sampler import EngineRates
from eagleray.server.dashboard.state import ApiServerRow, EngineRow, EventRow, MemberState, NodeRow, WorkerRow

MAX_EVENTS = 100
MAX_CAUSE_CHARS = 600

Event = Joined | Left


def event_rows(events: Sequence[Event]) -> list[EventRow]:
    """Return the latest events, the newest first."""
    rows: list[EventRow] = []
    lost_at: dict[MemberId, float] = {}
    for event in events:
        key = replica_key(event.member)
        if isinstance(event, Left):
            if event.returns or not event.is_planned:
                lost_at.setdefault(key, event.time)
            rows.append(
                EventRow(
                    time=event.time,
                    member=event.member.label,
                    kind="left" if event.is_planned else "lost",
                    cause=_shortened(event.cause),
                    returns=event.returns,
                )
            )
        else:
            since = lost_at.pop(key, None)
            rows.append(
                EventRow(
                    time=event.time,
                    member=event.member.label,
                    kind="started" if since is None else "recovered",
                    downtime=None if since is None else max(0.0, event.time - since),
                )
            )
    return rows[: -MAX_EVENTS - 1 : -1]


def engine_rows(
    first_engines: Iterable[EngineId],
    latest: Mapping[MemberId, Event],
    infos: Mapping[int, EngineInfo],
    stats: Mapping[EngineId, EngineStats],
    rates: Mapping[EngineId, EngineRates],
    *,
    tensor_parallel_size: int,
) -> list[EngineRow]:
    """Return a row for each engine of the instance. `infos`: the last known properties by rank."""
    rows = []
    for first in first_engines:
        event = latest.get(first)
        engine = first if event is None or not isinstance(event.member, EngineId) else event.member
        state, info, load = _state(event), infos.get(first.rank), stats.get(engine)
        serves = state == "serving"
        process = None if info is None else info.process
        rate = rates.get(engine, EngineRates(None, None))
        rows.append(
            EngineRow(
                rank=first.rank,
                label=engine.label,
                state=state,
                since=None if event is None else event.time,
                restarts=engine.incarnation,
                cause=_cause(event),
                host=None if process is None else process.host,
                pid=process.pid if process is not None and serves else None,
                workers=[] if info is None else _worker_rows(info, state, tensor_parallel_size),
                num_running=0 if load is None else load.num_running,
                num_waiting=0 if load is None else load.num_waiting,
                cache_usage=None if load is None else cache_usage([load]),
                prompt_tokens_per_second=rate.prompt_tokens,
                generation_tokens_per_second=rate.generation_tokens,
            )
        )
    return rows


def api_server_keys(first_servers: Collection[ClientId], latest: Mapping[MemberId, Event]) -> list[ClientId]:
    """Return the replica keys of the API servers, by index: those of the start and those that were added, without those
    that were removed."""
    keys = {key for key in latest if isinstance(key, ClientId) and key.index < FIRST_EXTERNAL_INDEX}
    removed = {key for key in keys if isinstance(left := latest[key], Left) and left.is_planned}
    return sorted((keys | set(first_servers)) - removed, key=lambda key: key.index)


def api_server_rows(
    first_servers: Iterable[ClientId],
    latest: Mapping[MemberId, Event],
    pids: Mapping[int, int],
    num_in_flight: Mapping[int, int],
) -> list[ApiServerRow]:
    """Return a row for each API server of the instance; numbers are by index."""
    rows = []
    for first in first_servers:
        event = latest.get(first)
        state = _state(event)
        server = first if event is None else event.member
        serves = state == "serving"
        rows.append(
            ApiServerRow(
                index=first.index,
                label=server.label,
                state=state,
                since=None if event is None else event.time,
                restarts=server.incarnation,
                cause=_cause(event),
                pid=pids.get(first.index) if serves else None,
                num_in_flight=num_in_flight.get(first.index, 0) if serves else 0,
            )
        )
    return rows


def node_rows(engines: Sequence[EngineRow], api_servers: Sequence[ApiServerRow], server_host: str) -> list[NodeRow]:
    """Return a row for each host, `server_host`, on which the API servers are, first."""
    engines_on: defaultdict[str | None, list[EngineRow]] = defaultdict(list)
    workers_on: defaultdict[str | None, list[WorkerRow]] = defaultdict(list)
    for engine in engines:
        engines_on[engine.host].append(engine)
        for worker in engine.workers:
            workers_on[worker.host].append(worker)
    hosts = dict.fromkeys([server_host, *(host for engine in engines for host in _hosts(engine))])
    return [
        NodeRow(
            host=host,
            engines=[engine.label for engine in engines_on[host] if engine.state == "serving"],
            num_workers=sum(worker.state == "serving" for worker in workers_on[host]),
            num_away=sum(engine.state != "serving" for engine in engines_on[host])
            + sum(worker.state != "serving" for worker in workers_on[host]),
            num_api_servers=sum(server.state == "serving" for server in api_servers) if host == server_host else 0,
        )
        for host in hosts
    ]


def cache_usage(stats: Collection[EngineStats]) -> float | None:
    """Return the part of the engines' cache blocks that is in use; None without engines."""
    num_blocks = sum(one.num_kv_blocks for one in stats)
    return (num_blocks - sum(one.num_free_kv_blocks for one in stats)) / num_blocks if num_blocks else None


def _hosts(engine: EngineRow) -> list[str]:
    return [host for host in (engine.host, *(worker.host for worker in engine.workers)) if host is not None]


def _worker_rows(info: EngineInfo, state: MemberState, tensor_parallel_size: int) -> list[WorkerRow]:
    return [
        WorkerRow(
            label=f"tp{rank % tensor_parallel_size}-pp{rank // tensor_parallel_size}",
            state=state,
            host=process.host,
            pid=process.pid if state == "serving" else None,
        )
        for rank, process in enumerate(info.workers)
    ]


def _state(event: Event | None) -> MemberState:
    if event is None:
        return "starting"
    if isinstance(event, Joined):
        return "serving"
    return "restarting" if event.returns else "gone"


def _cause(event: Event | None) -> str | None:
    return _shortened(event.cause) if isinstance(event, Left) else None


def _shortened(cause: str) -> str:
    return cause if len(cause) <= MAX_CAUSE_CHARS else cause[: MAX_CAUSE_CHARS - 1] + "…"
