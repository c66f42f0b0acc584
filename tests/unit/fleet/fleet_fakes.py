"""A supervisor whose processes are fakes: the test sends their messages and their exits. The sockets are real."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec

from eagleray.config.build import build_config
from eagleray.fleet.replica import Up
from eagleray.fleet.supervisor import Supervisor
from eagleray.identity import SUPERVISOR, ClientId, EngineId, MemberId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Failure
from eagleray.messages.lifecycle import ApiServerSpec, Attach, Bound, ClientStarted, EngineSpec, EngineStarted, Knows
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX, ENGINE_OUTBOX, SUPERVISOR_OUTBOX
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import AsyncInbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 20.0
KILLED = "it was killed by SIGKILL"
INFO = EngineInfo(architecture="Tiny", vocab_size=500, max_model_len=64, block_size=4, num_kv_blocks=100)


def in_loop(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        async def limited() -> None:
            async with asyncio.timeout(3 * SECONDS):
                await test(*args, **kwargs)

        asyncio.run(limited())

    return run


class FakeProcess:
    """A spawned process. It records the `signals` that it is sent, and ignores them."""

    def __init__(self, spec, on_message, on_exit):
        self.id: MemberId = spec.engine if isinstance(spec, EngineSpec) else spec.client
        self.label = self.id.label
        self.spec: EngineSpec | ApiServerSpec = spec
        self.report = on_message
        self._on_exit = on_exit
        self.signals: list[str] = []
        self.has_ended = False

    def terminate(self):
        self.signals.append("terminate")

    def kill(self):
        self.signals.append("kill")

    def end(self):
        assert not self.has_ended
        self.has_ended = True
        self._on_exit(Failure.noticed(KILLED))


class FakeLauncher:
    host = None

    def __init__(self):
        self.all: list[FakeProcess] = []
        self.failures: list[Exception] = []
        """Exceptions that the next calls of `spawn` raise."""
        self.is_closed = False
        self._new: asyncio.Queue[FakeProcess] = asyncio.Queue()

    def spawn(self, spec, *, on_message, on_exit):
        if self.failures:
            raise self.failures.pop(0)
        process = FakeProcess(spec, on_message, on_exit)
        self.all.append(process)
        self._new.put_nowait(process)
        return process

    async def next(self) -> FakeProcess:
        """Return the next process that is spawned."""
        async with asyncio.timeout(SECONDS):
            return await self._new.get()

    @property
    def has_new(self) -> bool:
        return not self._new.empty()

    async def close(self):
        self.is_closed = True

    def kill(self):
        pass


def untimed(attach: Attach) -> Attach:
    """Return the message without times, and without the history."""
    members = [msgspec.structs.replace(joined, time=0.0) for joined in attach.members]
    missing = [msgspec.structs.replace(left, time=0.0) for left in attach.missing]
    return msgspec.structs.replace(attach, members=members, missing=missing, history=[])


class FakeMember:
    """A member with a real inbox. The test sends its messages, but a client sends `Knows` by itself."""

    def __init__(self, fleet: Fleet, name: str):
        self.inbox = AsyncInbox(fleet.supervisor.runtime_dir, name, Codec(CLIENT_INBOX | SUPERVISOR_OUTBOX).decode)
        self.outbox = Outbox(Codec(ENGINE_OUTBOX | CLIENT_OUTBOX).encode)
        self.outbox.connect(SUPERVISOR, fleet.address)
        self.attach: Attach | None = None
        self.heartbeats: HeartbeatSender | None = None
        self._received: asyncio.Queue[Any] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read())
        fleet.ends.callback(self.close)

    def send(self, message):
        self.outbox.send(SUPERVISOR, message)

    async def receive(self):
        async with asyncio.timeout(SECONDS):
            return await self._received.get()

    async def attached(self) -> Attach:
        attach = await self.receive()
        assert isinstance(attach, Attach)
        return attach

    def start(self):
        """Report that the member has started, and send heartbeats if it has to."""
        assert self.attach is not None
        if self.attach.heartbeat:
            self.heartbeats = HeartbeatSender.start(self.attach.heartbeat, on_silent=lambda seconds: None)
        member = self.attach.member
        self.send(EngineStarted(member, INFO) if isinstance(member, EngineId) else ClientStarted(member))

    async def _read(self):
        while True:
            message = await self.inbox.receive()
            if isinstance(message, Attach):
                self.attach = message = untimed(message)
            elif isinstance(message, Joined | Left):
                message = msgspec.structs.replace(message, time=0.0)
            for one in message.members if isinstance(message, Attach) else [message]:
                self._send_knows(one)
            self._received.put_nowait(message)

    def _send_knows(self, message):
        match self.attach.member, message:
            case ClientId() as client, Joined(EngineId() as engine):
                self.send(Knows(client, engine))

    def close(self):
        self._reading.cancel()
        if self.heartbeats is not None:
            self.heartbeats.close()
        self.inbox.close()
        self.outbox.close()


class Fleet:
    def __init__(self, supervisor: Supervisor, launcher: FakeLauncher, ends: contextlib.ExitStack):
        self.supervisor = supervisor
        self.launcher = launcher
        self.ends = ends

    @property
    def address(self) -> str:
        return f"ipc://{self.supervisor.runtime_dir}/supervisor"

    async def adopt(self) -> FakeMember:
        """Adopt a client, which receives every change of the membership."""
        client = ClientId(self.supervisor.instance, 900)
        member = FakeMember(self, "observer")
        self.supervisor.adopt(client, member.inbox.address)
        await member.attached()
        member.start()
        return member

    async def bring_up(self, process: FakeProcess) -> FakeMember:
        """Attach the process and wait until it is up."""
        member = await self.bind(process)
        member.start()
        await self.until(lambda: isinstance(self.supervisor._state._replicas.of(process.id).state, Up))
        return member

    async def bind(self, process: FakeProcess) -> FakeMember:
        member = FakeMember(self, process.label)
        process.report(Bound(process.id, member.inbox.address))
        assert (await member.attached()).member == process.id
        return member

    async def until(self, condition: Callable[[], bool]) -> None:
        """Poll until the condition holds."""
        async with asyncio.timeout(SECONDS):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def fleet(**options: Any) -> AsyncIterator[Fleet]:
    """Open a supervisor and start the engines, and the API servers if `api_server_count` is given."""
    config = build_config(**{"heartbeat_timeout": 1.0, **options})
    ends, members = AsyncExitStack(), contextlib.ExitStack()
    runtime_dir = make_runtime_dir()
    ends.callback(remove_runtime_dir, runtime_dir)
    launcher = FakeLauncher()
    supervisor = Supervisor(
        config,
        instance="i",
        runtime_dir=runtime_dir,
        engine_launcher=launcher,
        api_server_launcher=launcher,
        ray=None,
        exit_stack=ends,
    )
    with members:
        try:
            supervisor.start_engines()
            if "api_server_count" in options:
                supervisor.start_api_servers(0)
            yield Fleet(supervisor, launcher, members)
        finally:
            supervisor.kill()  # nothing is started from now on
            for process in launcher.all:
                if not process.has_ended:
                    process.end()
            await supervisor.stop(0.0)
            assert not runtime_dir.exists()


def joined(member: MemberId) -> Callable[[object], bool]:
    return lambda message: isinstance(message, Joined) and message.member == member


def left(member: MemberId) -> Callable[[object], bool]:
    return lambda message: isinstance(message, Left) and message.member == member
