from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re

import msgspec
import numpy as np
from server_fakes import ENGINE, Call, serving, stats

from eagleray.identity import ClientId, EngineId, next_incarnation
from eagleray.messages.lifecycle import Attach, Stop
from eagleray.messages.membership import Joined, Left, ProcessInfo
from eagleray.messages.outputs import ExpertLoad
from eagleray.metrics.ledger import IN_FLIGHT, Ledger
from eagleray.server.dashboard import feed
from eagleray.server.dashboard.feed import MAX_STREAMS, DashboardFeed
from eagleray.server.dashboard.state import DashboardState
from eagleray.server.service import Service

KILLED = "it was killed by SIGKILL"
REPLACEMENT = next_incarnation(ENGINE)


def read(api, **headers):
    response = api.get("/dashboard/state", headers=headers)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=DashboardState)


class Watch(Call):
    """An open stream of the state."""

    def __init__(self, app):
        self._has_new = asyncio.Event()
        super().__init__(app, "/dashboard/state", {}, method="GET", headers=[(b"accept", b"text/event-stream")])

    async def _send(self, message):
        await super()._send(message)
        self._has_new.set()

    @property
    def states(self):
        return [msgspec.json.decode(data, type=DashboardState) for data in re.findall("data: ({.*})\n\n", self.text)]

    async def until(self, holds):
        async with asyncio.timeout(10):
            while not (self.states and holds(self.states[-1])):
                self._has_new.clear()
                await self._has_new.wait()
        return self.states[-1]


def test_dashboard_page_needs_no_key_and_allows_only_its_own_script_and_style(checkpoint):
    with serving(checkpoint, api_key=["secret"]) as api:
        response = api.get("/dashboard")
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/html; charset=utf-8"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        for tag in ("script", "style"):
            (inline,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, flags=re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
            assert f"{tag}-src 'sha256-{digest}'" in policy
        assert not re.search(r"""(src|href)=["'](?!data:)|@import|url\(""", response.text), "fetches something"


def test_dashboard_state_needs_the_key(checkpoint):
    with serving(checkpoint, api_key=["secret"]) as api:
        assert api.get("/dashboard/state").status_code == 401
        assert api.get("/dashboard/state?api_key=secret").status_code == 401
        assert read(api, Authorization="Bearer secret").model == "tiny"


def test_dashboard_disabled_has_no_routes(checkpoint):
    with serving(checkpoint, disable_dashboard=True) as api:
        assert api.get("/dashboard").status_code == api.get("/dashboard/state").status_code == 404


def test_dashboard_below_root_path_is_served(checkpoint):
    with serving(checkpoint, root_path="/llm") as api:
        assert api.get("/llm/dashboard/").status_code == api.get("/llm/dashboard/state").status_code == 200


def test_dashboard_state_has_engines_traffic_and_servers(api):
    api.deliver(Joined(ENGINE, "e", next(iter(api.client.engines.values())), time=1.0))
    api.deliver(stats(num_running=2, num_waiting=1, num_kv_blocks=8, num_free_kv_blocks=6))
    state = read(api)
    assert (state.state, state.cause, state.server) == ("serving", None, "client-0")
    (engine,) = state.engines
    assert (engine.label, engine.state, engine.num_running, engine.cache_usage) == ("engine-0", "serving", 2, 0.25)
    assert (state.traffic.num_running, state.traffic.num_waiting, state.traffic.cache_usage) == (2, 1, 0.25)
    assert [server.label for server in state.api_servers] == ["client-0"]
    assert state.traffic.generation_tokens_per_second is None


def test_dashboard_state_counts_requests_of_all_api_servers(checkpoint):
    with serving(checkpoint, api_server_count=2) as api:
        other = ClientId("test", 1)
        api.deliver(Joined(other, "o"))
        ledger = Ledger.open(api.ledger._directory, 1)
        ledger.tally(IN_FLIGHT).set(5)
        ledger.close()
        state = read(api)
        assert [server.num_in_flight for server in state.api_servers] == [0, 5]
        assert state.traffic.num_in_flight == 5
        gone, external = ClientId("test", 0), ClientId("test", 1_000_000)
        api.deliver(Joined(ClientId("test", 2), "o"), Joined(external, "o"))
        api.deliver(Left(gone, "it was removed by scaling", returns=False, is_planned=True))
        api.deliver(Left(other, KILLED, returns=False))
        shown = [(server.label, server.state) for server in read(api).api_servers]
        assert shown == [("client-1", "gone"), ("client-2", "serving")]


def test_dashboard_state_has_the_engines_of_now(api):
    added, info = EngineId("test", 2), next(iter(api.client.engines.values()))
    api.deliver(Joined(added, "e", info, time=1.0))
    assert [engine.label for engine in read(api).engines] == ["engine-0", "engine-2"]
    api.deliver(Left(added, "it was removed by scaling", returns=False, is_planned=True))
    assert [engine.label for engine in read(api).engines] == ["engine-0"]


def test_dashboard_state_of_later_server_has_earlier_events(api):
    history = [Joined(ENGINE, "", time=1.0), Left(ENGINE, KILLED, time=5.0), Joined(REPLACEMENT, "", time=7.5)]
    api.deliver(Attach(ClientId("test", 0), "nowhere", [], history=history))
    events = read(api).events
    assert [(event.member, event.kind, event.downtime) for event in events[1:]] == [
        ("engine-0.1", "recovered", 2.5),
        ("engine-0", "lost", None),
        ("engine-0", "started", None),
    ]
    assert (events[0].member, events[0].kind) == ("client-0", "started")


def test_dashboard_stream_shows_an_exit_at_once(api, monkeypatch):
    async def watch():
        stream = Watch(api.app)
        first = await stream.until(lambda state: True)
        assert (first.state, first.experts.load) == ("serving", [[150, 50]])
        api.engine.deliver(Left(ENGINE, KILLED))
        state = await stream.until(lambda state: state.events[0].kind == "lost")
        assert (state.state, state.engines[0].state, state.engines[0].cause) == ("down", "restarting", KILLED)
        assert len(stream.states) == 2
        assert state.experts is None
        stream.leave()
        await stream.task

    monkeypatch.setattr(feed, "DASHBOARD_INTERVAL_SECONDS", 1000.0)
    api.deliver(ExpertLoad(engine=ENGINE, counts=np.array([[3, 1]])))
    api.run(watch())


def test_dashboard_stream_has_rates_from_the_second_state_on(api, monkeypatch):
    async def watch():
        stream = Watch(api.app)
        first = await stream.until(lambda state: True)
        assert first.traffic.generation_tokens_per_second is None
        api.engine.deliver(stats(num_generation_tokens=160))
        state = await stream.until(lambda state: state.traffic.generation_tokens_per_second)
        assert state.engines[0].generation_tokens_per_second == state.traffic.generation_tokens_per_second
        assert state.engines[0].prompt_tokens_per_second == 0.0
        stream.leave()
        await stream.task

    monkeypatch.setattr(feed, "DASHBOARD_INTERVAL_SECONDS", 0.1)
    api.deliver(stats(num_generation_tokens=100))
    api.run(watch())


def test_dashboard_stream_ends_when_the_server_stops(api):
    async def watch():
        stream = Watch(api.app)
        await stream.until(lambda state: True)
        api.engine.deliver(Stop(5.0))
        async with asyncio.timeout(10):
            await stream.task
        assert stream.states[-1].state == "stopping"
        assert stream.text.endswith("data: [DONE]\n\n")

    api.run(watch())
    assert api.get("/dashboard/state", headers={"Accept": "text/event-stream"}).status_code == 503


def test_dashboard_stream_ends_after_a_time(api, monkeypatch):
    async def watch():
        stream = Watch(api.app)
        async with asyncio.timeout(10):
            await stream.task
        assert [state.state for state in stream.states] == ["serving"]
        assert stream.text.endswith("data: [DONE]\n\n")

    monkeypatch.setattr(feed, "DASHBOARD_STREAM_SECONDS", 0.0)
    api.run(watch())


def test_dashboard_state_of_a_later_application_has_the_processes_of_engines(api):
    """As in a replica of Ray Serve, which makes its application when the engines have started."""
    info = next(iter(api.client.engines.values()))
    process = ProcessInfo(host="node-1", pid=4711)
    api.deliver(Left(ENGINE, KILLED), Joined(REPLACEMENT, "e", msgspec.structs.replace(info, process=process)))
    feed = DashboardFeed(Service(api.client, api.config, api.ledger), api.config)
    (engine,) = feed.read().engines
    assert (engine.label, engine.host, engine.pid) == (REPLACEMENT.label, "node-1", 4711)


def test_dashboard_streams_beyond_the_limit_are_refused(checkpoint):
    async def fill(api, limit):
        *streams, refused = (Watch(api.app) for _ in range(limit + 1))
        for stream in streams:
            await stream.until(lambda state: True)
        await refused.task
        assert refused.received[0]["status"] == 503
        assert f"streams its state to {limit} pages" in json.loads(refused.text)["error"]["message"]
        for stream in streams:
            stream.leave()
            await stream.task
        again = Watch(api.app)
        await again.until(lambda state: True)
        again.leave()
        await again.task

    for options, limit in (({}, MAX_STREAMS), ({"max_connections": 17}, 2)):
        with serving(checkpoint, **options) as api:
            api.run(fill(api, limit))
