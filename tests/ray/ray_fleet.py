"""A minimal supervisor of engines that are actors of the cluster, and a client of these engines."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from output_chunks import chunks_of

from eagleray.config.sections import Config
from eagleray.fleet.ray_launcher import RayEngine, RayLauncher
from eagleray.identity import ClientId, EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Attach, Bound, EngineSpec, EngineStarted, Stop
from eagleray.messages.membership import Joined
from eagleray.messages.outputs import Chunks
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.wires import CLIENT_INBOX, SUPERVISOR_INBOX, SUPERVISOR_OUTBOX
from eagleray.messages.workers import RayContext
from eagleray.transport.inbox import AsyncInbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 60.0
CLIENT = ClientId("test", 0)


class Engine:
    """An engine that was spawned, and the reports about it."""

    def __init__(self, name: EngineId) -> None:
        self.name = name
        self.address: str | None = None
        self.failures: list[Failure] = []
        """Exceptions that ended it."""
        self.ends: list[str] = []
        self.bound = asyncio.Event()
        """Set when the engine is bound or has ended."""
        self.ended = asyncio.Event()
        self.spawned: RayEngine

    def on_message(self, message: Bound | Ended) -> None:
        assert not self.ends, "a message after the end"
        assert isinstance(message, Bound)
        self.address = message.address
        self.bound.set()

    def on_exit(self, cause: Failure) -> None:
        self.ends.append(str(cause))
        if cause.is_exception:
            self.failures.append(cause)
        self.bound.set()
        self.ended.set()

    async def end(self, seconds: float = SECONDS) -> str:
        """Wait at most `seconds` for its end and return the cause."""
        async with asyncio.timeout(seconds):
            await self.ended.wait()
        (reason,) = self.ends
        return reason


class Fleet:
    """A supervisor and a client, owned by the event loop."""

    def __init__(self, config: Config, instance: str, runtime_dir: Path, launcher: RayLauncher) -> None:
        self.instance = instance
        self.launcher = launcher
        self._config = config
        self._inbox: Any = AsyncInbox(runtime_dir, "supervisor", Codec(SUPERVISOR_INBOX).decode, host=launcher.host)
        self._answers: Any = AsyncInbox(runtime_dir, "client", Codec(CLIENT_INBOX).decode, host=launcher.host)
        self._outbox: Any = Outbox(Codec(SUPERVISOR_OUTBOX | Generate).encode)

    def spawn(self, rank: int, incarnation: int = 0) -> Engine:
        name = EngineId(self.instance, rank, incarnation)
        engine = Engine(name)
        spec = EngineSpec(name, self._config, runtime_dir="")
        engine.spawned = self.launcher.spawn(spec, on_message=engine.on_message, on_exit=engine.on_exit)
        return engine

    async def attach(self, *engines: Engine) -> None:
        """Attach engines and wait until they have started."""
        expected = set()
        for engine in engines:
            async with asyncio.timeout(SECONDS):
                await engine.bound.wait()
            assert engine.address is not None, engine.ends
            self._outbox.connect(engine.name, engine.address)
            client = Joined(CLIENT, self._answers.address)
            self._outbox.send(engine.name, Attach(engine.name, self._inbox.address, [client]))
            expected.add(engine.name)
        while expected:
            match await self._report(SECONDS):
                case EngineStarted(name):
                    expected.discard(name)
                case Ended(_, cause):
                    raise AssertionError(cause)

    async def start(self, *ranks: int) -> list[Engine]:
        engines = [self.spawn(rank) for rank in ranks]
        await self.attach(*engines)
        return engines

    async def failing(self) -> Failure:
        """Return the next failure that an attached engine reports."""
        while True:
            match await self._report(SECONDS):
                case Ended(_, cause):
                    return cause

    async def generate(self, engine: Engine, prompt: list[int], max_tokens: int = 8) -> list[int]:
        request = Generate(
            request_id="0",
            client=CLIENT,
            prompt_token_ids=prompt,
            sampling=Sampling(seed=0, temperature=0.0),
            stopping=Stopping(max_tokens=max_tokens),
        )
        self._outbox.send(engine.name, request)
        tokens: list[int] = []
        async with asyncio.timeout(SECONDS):
            while True:
                match await self._answers.receive():
                    case Chunks(name) as message if name == engine.name:
                        for chunk in chunks_of(message):
                            tokens += chunk.token_ids
                            if chunk.finish_reason is not None:
                                return tokens

    async def stop(self, *engines: Engine) -> None:
        """Stop engines like the supervisor does."""
        for engine in engines:
            self._outbox.send(engine.name, Stop(0.0))
        for engine in engines:
            await engine.end()

    def close(self) -> None:
        self._inbox.close()
        self._answers.close()
        self._outbox.close()

    async def _report(self, seconds: float) -> Any:
        async with asyncio.timeout(seconds):
            return await self._inbox.receive()


@contextlib.asynccontextmanager
async def fleet(
    config: Config, instance: str, *, ray: RayContext | None = None, target: str | None = None
) -> AsyncIterator[Fleet]:
    """Open a fleet and clean up everything that it has started. `target`: function that binds an engine."""
    runtime_dir = make_runtime_dir()
    options = {} if target is None else {"engine_target": target}
    try:
        launcher = await RayLauncher.open(config, instance=instance, runtime_dir=runtime_dir, ray=ray, **options)
        try:
            made = Fleet(config, instance, runtime_dir, launcher)
            try:
                yield made
            finally:
                made.close()
        finally:
            await launcher.close()
    finally:
        remove_runtime_dir(runtime_dir)
