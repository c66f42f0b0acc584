"""The state of the instance as a document, and as a stream: once a second, and at once when a member joins or leaves.

Counters are read while somebody watches; otherwise nothing is done. Driven by the handlers of the routes and by changes
that the client reports, in the server's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import time

from eagleray.config.sections import Config
from eagleray.errors import Unavailable
from eagleray.identity import ClientId, EngineId, display_name
from eagleray.messages.membership import EngineInfo
from eagleray.server.connection_limit import DEFAULT_CONNECTIONS
from eagleray.server.dashboard.expert_window import ExpertWindow
from eagleray.server.dashboard.rows import (
    api_server_keys,
    api_server_rows,
    cache_usage,
    engine_rows,
    event_rows,
    node_rows,
)
from eagleray.server.dashboard.sampler import Sampler
from eagleray.server.dashboard.state import DashboardState, Traffic
from eagleray.server.http_responses import Emit
from eagleray.server.service import Service
from eagleray.server.timeouts import DASHBOARD_INTERVAL_SECONDS, DASHBOARD_PAUSE_SECONDS, DASHBOARD_STREAM_SECONDS

MAX_STREAMS = 16
CONNECTIONS_PER_STREAM = 8
"""Number of connections that a server must allow for each stream, so that pages cannot take all of them."""


class DashboardFeed:
    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        self._client = service.client
        self._sampler = Sampler(service.client, service.metrics.requests, service.ledger)
        self._experts = ExpertWindow()
        self._sampled_at = float("-inf")
        instance = service.client.client_id.instance
        self._first_api_servers = {ClientId(instance, index) for index in range(config.serving.api_server_count)}
        self._tensor_parallel_size = config.parallel.tensor_parallel_size
        connections = config.serving.max_connections or DEFAULT_CONNECTIONS
        self._max_streams = min(MAX_STREAMS, connections // CONNECTIONS_PER_STREAM)
        self._streams: set[asyncio.Event] = set()
        """For each stream, an event that is set when something has changed."""
        self._infos: dict[int, EngineInfo] = {}
        """Properties of the last engine of each rank."""
        self._on_change()  # in a replica of Ray Serve, engines have joined before
        self._client.observe_instance(self._on_change)

    async def stream(self, emit: Emit) -> None:
        """Send the state until the server stops, for `DASHBOARD_STREAM_SECONDS` at most. Experts are sent when they
        have changed.

        Raises `Unavailable` if this server is stopping, or streams to as many pages as it may.
        """
        self._check_room()
        changed, seen_experts = asyncio.Event(), -1
        deadline = time.monotonic() + DASHBOARD_STREAM_SECONDS
        self._streams.add(changed)
        try:
            while True:
                changed.clear()
                state = self.read(seen_experts)
                seen_experts = self._experts.version
                await emit(state)
                if self._client.stopping.is_set() or time.monotonic() >= deadline:
                    return
                await asyncio.sleep(DASHBOARD_PAUSE_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DASHBOARD_INTERVAL_SECONDS - DASHBOARD_PAUSE_SECONDS):
                        await changed.wait()
        finally:
            self._streams.discard(changed)

    def read(self, seen_experts: int = -1) -> DashboardState:
        """Return the state now, without the experts if their version is still `seen_experts`."""
        self._sample(time.monotonic())
        client, sampler = self._client, self._sampler
        latest = client.history.latest()
        engines = engine_rows(
            [EngineId(client.client_id.instance, rank) for rank in client.ranks],
            latest,
            self._infos,
            client.stats,
            {engine: sampler.engine_rates(engine) for engine in client.stats},
            tensor_parallel_size=self._tensor_parallel_size,
        )
        num_in_flight = sampler.num_in_flight | {client.client_id.index: client.num_in_flight}
        api_servers = api_server_rows(
            api_server_keys(self._first_api_servers, latest), latest, sampler.pids, num_in_flight
        )
        total_rates = sampler.total_rates
        return DashboardState(
            time=time.time(),
            version=self._service.version,
            instance=display_name(client.client_id.instance),
            model=self._service.model_name,
            server=client.client_id.label,
            state="stopping" if client.stopping.is_set() else client.state.name if client.engines else "down",
            cause=client.cause,
            weight_version=client.state.weight_version,
            traffic=Traffic(
                num_in_flight=sum(server.num_in_flight for server in api_servers),
                num_running=sum(engine.num_running for engine in engines),
                num_waiting=sum(engine.num_waiting for engine in engines),
                requests_per_second=sampler.requests_per_second,
                prompt_tokens_per_second=total_rates.prompt_tokens,
                generation_tokens_per_second=total_rates.generation_tokens,
                cache_usage=cache_usage(client.stats.values()),
                cache_hits=sampler.cache_hits,
                time_to_first_token=sampler.time_to_first_token,
                time_per_output_token=sampler.time_per_output_token,
            ),
            engines=engines,
            api_servers=api_servers,
            nodes=node_rows(engines, api_servers, platform.node()),
            events=event_rows(client.history.events),
            experts=self._experts.heat() if self._experts.version != seen_experts else None,
        )

    def _check_room(self) -> None:
        self._service.check_running()
        if len(self._streams) >= self._max_streams:
            raise Unavailable(
                f"this server streams its state to {len(self._streams)} pages, its limit (an eighth of the option "
                f"`max_connections`, at most {MAX_STREAMS}): close another page, or raise the option"
            )

    def _on_change(self) -> None:
        self._infos |= {engine.rank: info for engine, info in self._client.engines.items()}
        for changed in self._streams:
            changed.set()

    def _sample(self, now: float) -> None:
        """Read the counters, unless that was done a moment ago for another stream."""
        if now - self._sampled_at < DASHBOARD_INTERVAL_SECONDS / 2:
            return
        self._sampled_at = now
        self._sampler.sample(now)
        self._experts.update(now, self._client.expert_load.values())
