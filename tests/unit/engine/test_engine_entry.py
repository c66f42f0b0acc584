"""Reports of an engine that cannot start. The tests in `tests/process` run whole engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_fakes import ENGINE

from eagleray.config.build import build_config
from eagleray.engine import entry
from eagleray.engine.entry import Engine
from eagleray.errors import CheckpointError, ConfigError, DeadlineExceeded
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended
from eagleray.messages.lifecycle import Attach, EngineSpec, MemberToSupervisor, SupervisorToMember
from eagleray.messages.wires import SUPERVISOR_INBOX, SUPERVISOR_OUTBOX
from eagleray.transport.inbox import Inbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 30.0
HOSTS = pytest.mark.parametrize("host", [None, "127.0.0.1"])


class Supervisor:
    """Fake supervisor: the inbox that an engine reports to."""

    def __init__(self, runtime_dir: Path, host: str | None) -> None:
        decode = Codec[MemberToSupervisor](SUPERVISOR_INBOX).decode
        self.inbox = Inbox(runtime_dir, "supervisor", decode, host=host)
        self.outbox = Outbox(Codec[SupervisorToMember](SUPERVISOR_OUTBOX).encode)

    def attach(self, engine: Engine) -> None:
        self.outbox.connect(ENGINE, engine.address)
        self.outbox.send(ENGINE, Attach(ENGINE, self.inbox.address, []))

    def close(self) -> None:
        self.inbox.close()
        self.outbox.close()


@pytest.fixture
def supervisor(host):
    runtime_dir = make_runtime_dir()
    one = Supervisor(runtime_dir, host)
    yield one
    one.close()
    remove_runtime_dir(runtime_dir)


def bind(host: str | None = None, **options) -> Engine:
    """Make an engine with a runtime directory of its own."""
    return Engine.bind(EngineSpec(ENGINE, build_config(num_threads=1, **options), runtime_dir="", host=host))


def test_engine_no_attach_reports_error_and_cleans_up(monkeypatch):
    monkeypatch.setattr(entry, "ATTACH_TIMEOUT_SECONDS", 0.05)
    engine, told = bind(), []
    runtime_dir = Path(engine.address.removeprefix("ipc://")).parent
    assert runtime_dir.is_dir()
    with pytest.raises(DeadlineExceeded, match="no Attach within 0 s after engine-0 was bound"):
        engine.run(told.append)
    assert [type(error) for error in told] == [DeadlineExceeded]
    assert not runtime_dir.exists()


@HOSTS
def test_engine_without_pipe_start_failure_is_sent_to_supervisor(supervisor, host, tmp_path):
    engine, told = bind(host, model=str(tmp_path / "nothing")), []
    supervisor.attach(engine)
    with pytest.raises(CheckpointError, match="there is no such directory"):
        engine.run(told.append)
    assert [type(error) for error in told] == [CheckpointError]
    failing = supervisor.inbox.receive(SECONDS)
    assert isinstance(failing, Ended)
    assert (failing.member, failing.cause.kind, failing.cause.is_user_error) == (ENGINE, "CheckpointError", True)


@pytest.mark.parametrize("host", [None])
def test_engine_with_pipe_start_failure_is_reported_once(supervisor, host, tmp_path):
    engine, told = bind(model=str(tmp_path / "nothing")), []
    supervisor.attach(engine)
    with pytest.raises(CheckpointError):
        engine.run(told.append, has_pipe=True)
    assert len(told) == 1
    assert supervisor.inbox.receive(0.2) is None


def test_engine_bind_foreign_address_is_refused():
    with pytest.raises(ConfigError, match="an address of this host"):
        bind("192.0.2.1")
