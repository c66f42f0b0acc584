"""An engine as a process: start, service, exit, and the reports of a failure."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import msgspec
import pytest
from forked_programs import fork_server_of_tests
from output_chunks import chunks_of

from eagleray.config.build import build_config
from eagleray.identity import ClientId, EngineId
from eagleray.log import LogSettings
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.lifecycle import Attach, Bound, EngineSpec, EngineStarted, Stop
from eagleray.messages.membership import Joined
from eagleray.messages.outputs import Chunk, Chunks
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.wires import CLIENT_INBOX, ENGINE_INBOX, SUPERVISOR_INBOX
from eagleray.process.spawn import Child
from eagleray.transport.heartbeat import HeartbeatMonitor
from eagleray.transport.inbox import Inbox, Outbox

SECONDS = 60.0
ENGINE, CLIENT = EngineId("test", 0), ClientId("test", 0)
RUN = "eagleray.engine.entry:run"


class Fleet:
    """An engine process, its supervisor, and a client."""

    def __init__(self, runtime_dir: Path, *, target: str = RUN, host: str | None = None, **options: Any) -> None:
        self.said: queue.Queue[Any] = queue.Queue()
        """Messages of the engine over its pipe; the last item is the exit reason."""
        self.supervisor = Inbox(runtime_dir, "supervisor", Codec(SUPERVISOR_INBOX).decode, host=host)
        self.client = Inbox(runtime_dir, "client", Codec(CLIENT_INBOX).decode, host=host)
        self.outbox: Outbox[str, Any] = Outbox(Codec(ENGINE_INBOX).encode)
        self.pulse = HeartbeatMonitor.open(
            num_peers=1, runtime_dir=runtime_dir, host=host, limit=2.0, on_silent=lambda peer, seconds: None
        )
        config = build_config(num_threads=1, **options)
        spec = EngineSpec(ENGINE, config, runtime_dir="" if host else str(runtime_dir), host=host)
        self.child = Child(
            target=target,
            member=ENGINE,
            payload=msgspec.msgpack.encode(spec),
            log=LogSettings(level="warning"),
            runtime_dir="/nonexistent",
            on_message=self.said.put,
            on_exit=lambda cause: self.said.put(cause.message),
            fork_server=fork_server_of_tests(),
        )

    def start(self) -> None:
        bound = self.said.get(timeout=SECONDS)
        assert isinstance(bound, Bound)
        self.outbox.connect("engine", bound.address)
        members = [Joined(CLIENT, self.client.address)]
        self.outbox.send("engine", Attach(ENGINE, self.supervisor.address, members, self.pulse.handle(0)))
        started = self.supervisor.receive(SECONDS)
        assert isinstance(started, EngineStarted) and started.engine == ENGINE

    def ask(self, **kwargs: Any) -> None:
        request = Generate(
            request_id="a",
            client=CLIENT,
            prompt_token_ids=[1, 2, 3],
            sampling=Sampling(seed=0, temperature=0.0),
            stopping=Stopping(max_tokens=5),
            **kwargs,
        )
        self.outbox.send("engine", request)

    def next_chunk(self) -> Chunk:
        while True:
            message = self.client.receive(SECONDS)
            assert message is not None, "the engine says nothing"
            if isinstance(message, Chunks):
                assert message.engine == ENGINE
                (chunk,) = chunks_of(message)
                return chunk

    def answer(self) -> list[int]:
        token_ids: list[int] = []
        while True:
            chunk = self.next_chunk()
            token_ids += chunk.token_ids
            if chunk.finish_reason:
                assert chunk.finish_reason == "length"
                return token_ids

    def close(self) -> None:
        self.child.kill()
        assert self.child.wait(SECONDS)
        self.pulse.close()
        self.outbox.close()
        self.client.close()
        self.supervisor.close()


@pytest.fixture
def open_fleet(runtime_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    opened = []

    def open_(**options: Any) -> Fleet:
        opened.append(Fleet(runtime_dir, **options))
        opened[-1].start()
        return opened[-1]

    yield open_
    for fleet in opened:
        fleet.close()


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_engine_process_serves_until_stop(open_fleet, host):
    fleet = open_fleet(host=host)
    fleet.ask()
    answer = fleet.answer()
    assert len(answer) == 5
    fleet.ask(output_token_ids=answer[:3])
    assert fleet.answer() == answer[3:]
    fleet.outbox.send("engine", Stop(0.0))
    assert fleet.said.get(timeout=SECONDS) == "it ended with exit code 0"


def test_cut_off_from_its_supervisor_it_ends_and_says_why(open_fleet, capfd):
    fleet = open_fleet()
    fleet.pulse.close()
    assert fleet.said.get(timeout=SECONDS) == "it ended with exit code 1"
    assert "no heartbeat from the supervisor for" in capfd.readouterr().err


def test_engine_process_hung_step_reports_and_exits(open_fleet):
    fleet = open_fleet(target="engine_children:hang_in_a_step", watchdog_timeout=0.5)
    fleet.ask()
    failed = fleet.said.get(timeout=SECONDS)
    assert isinstance(failed, Ended)
    assert failed.cause.kind == "DeadlineExceeded"
    assert failed.cause.message.startswith("step 0 (3 tokens in 1 rows) has been hanging for ")
    assert fleet.said.get(timeout=SECONDS) == "it ended with exit code 1"


def test_engine_process_suspect_start_is_sent_before_crash(open_fleet):
    fleet = open_fleet(target="engine_children:die_in_a_step")
    fleet.ask(is_suspect=True)
    assert fleet.next_chunk() == Chunk(request_id="a", is_started=True)
    assert fleet.said.get(timeout=SECONDS) == "it ended with exit code 3"
