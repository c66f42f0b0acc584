"""The API server process from start to exit: bind, be attached, serve HTTP. Driven by the supervisor's messages.

Several servers accept from one listening socket, which the supervisor holds. Each closes its own descriptor of it at
its exit, and the others continue. Nothing may call `shutdown` on the socket, because that would end it for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from eagleray.client.client import Client
from eagleray.config.serving import ServingConfig
from eagleray.hub.replacement import prepare_replacement
from eagleray.messages.lifecycle import ApiServerSpec
from eagleray.metrics.ledger import IN_FLIGHT, Ledger
from eagleray.metrics.statistics_log import StatisticsLog
from eagleray.process.gc_freeze import freeze_gc
from eagleray.process.open_files import open_files_limit
from eagleray.process.parent import Parent
from eagleray.server.acceptor import Acceptor, ConnectionCounts
from eagleray.server.app import create_app
from eagleray.server.connections import HttpConnections
from eagleray.server.endpoint import RequestMiddleware
from eagleray.server.http_protocol import HttpProtocol
from eagleray.server.timeouts import DRAIN_POLL_SECONDS, FLUSH_SECONDS
from eagleray.server.tls import Certificates, open_certificates
from eagleray.server.user_middleware import with_middleware
from eagleray.transport.runtime_dir import no_room


class _Server(uvicorn.Server):
    """uvicorn's server with our acceptor and protocol. Raises `ConfigError` for middleware that cannot be used.
    `on_tick` is called once a second or more often.

    It handles no signals, because the supervisor decides when it stops, and how long requests may take then.
    """

    def __init__(
        self,
        app: RequestMiddleware,
        options: ServingConfig,
        counts: ConnectionCounts,
        certificates: Certificates,
        on_tick: Callable[[], None],
    ) -> None:
        super().__init__(
            uvicorn.Config(
                with_middleware(app, options.middleware),
                interface="asgi3",
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=FLUSH_SECONDS,
            )
        )
        self.servers = []  # uvicorn's own listeners
        self._counts = counts
        self._on_server_tick = on_tick
        self._connections = HttpConnections(
            options,
            self.server_state,
            open_files=open_files_limit(),
            open_paths=app.open_paths,
            count_refusal=app.count_refusal,
        )
        self._certificates = certificates
        self._acceptor: Acceptor | None = None
        self._watching: asyncio.Task[None] | None = None
        self._accepts = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        self._acceptor = Acceptor(
            sockets[0],
            make_protocol=lambda is_reserved: HttpProtocol(self.config, self._connections, is_reserved=is_reserved),
            connections=self._connections,
            counts=self._counts,
            certificates=self._certificates,
        )
        if self._accepts:
            self._acceptor.start()
        self._watching = asyncio.create_task(self._connections.watch(self._on_tick))
        self.started = True

    async def leave(self, seconds: float) -> None:
        """Leave new connections to the other API servers, and wait until those that this one has are closed, for at
        most `seconds`."""
        self._accepts = False
        if self._acceptor is not None:
            self._acceptor.close()
        self._connections.is_leaving = True
        for connection in list(self.server_state.connections):
            assert isinstance(connection, HttpProtocol)
            connection.leave()
        deadline = time.monotonic() + seconds
        while self.server_state.connections and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def _on_tick(self) -> None:
        assert self._acceptor is not None
        if self._accepts:
            self._acceptor.report()
        self._certificates.refresh()
        self._on_server_tick()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)
        if self._watching is not None:
            self._watching.cancel()


def run(payload: bytes, parent: Parent) -> None:
    """Run the API server of `payload`, an encoded `ApiServerSpec`, until it is stopped. Raises `ConfigError`."""
    spec = msgspec.msgpack.decode(payload, type=ApiServerSpec)
    runtime_dir, index = Path(spec.runtime_dir), spec.client.index
    with contextlib.ExitStack() as stack:
        ledger = stack.enter_context(contextlib.closing(Ledger.open(runtime_dir / "metrics", index)))
        try:
            counts = ConnectionCounts(runtime_dir / "connections", server=index)
            stack.callback(counts.close)
        except OSError as error:
            raise no_room(runtime_dir, error) from error
        uvloop.run(_serve(spec, parent, ledger, counts))


async def _serve(spec: ApiServerSpec, parent: Parent, ledger: Ledger, counts: ConnectionCounts) -> None:
    _exit_between_callbacks()
    certificates = await open_certificates(spec.config.serving)
    client = Client.open(
        spec.client,
        spec.config,
        Path(spec.runtime_dir),
        prepare_checkpoint=partial(prepare_replacement, spec.config.model),
        host=spec.host,
    )
    app = create_app(client, spec.config, ledger, has_access_log=True)
    server = _Server(app, spec.config.serving, counts, certificates, on_tick=_server_tick(client, spec, ledger))
    freeze_gc()
    parent.report_bound(client.address)
    with socket.socket(fileno=spec.listener_fd) as listener:
        serving = asyncio.create_task(_accept(server, listener, client))
        reading = asyncio.create_task(client.run())
        stopping = asyncio.create_task(client.stopping.wait())
        await asyncio.wait([serving, reading, stopping], return_when=asyncio.FIRST_COMPLETED)
        if client.others_stay:
            await server.leave(client.grace)
        else:
            await _drain(client)
        await client.close()  # aborts what still runs, so that every connection gets a complete answer
        server.should_exit = True
        if not client.attached.is_set():
            serving.cancel()
        else:
            await serving
        stopping.cancel()
        await reading


def _exit_between_callbacks() -> None:
    """Have the loop call the handler of SIGTERM: if that raised `SystemExit` in a callback of a connection, the loop
    would log a traceback and continue."""
    handler = signal.getsignal(signal.SIGTERM)
    assert callable(handler)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, handler, signal.SIGTERM, None)


def _server_tick(client: Client, spec: ApiServerSpec, ledger: Ledger) -> Callable[[], None]:
    """Return the function that publishes the number of requests in flight, and logs statistics when it is time. One
    server of an instance logs them, since each has the stats of all engines."""
    in_flight = ledger.tally(IN_FLIGHT)
    log = None
    if spec.client.index == 0 and not spec.config.observability.disable_log_stats:
        log = StatisticsLog(lambda: client.stats.values(), time.monotonic())

    def tick() -> None:
        in_flight.set(client.num_in_flight)
        if log is not None:
            log.tick(time.monotonic())

    return tick


async def _accept(server: _Server, listener: socket.socket, client: Client) -> None:
    """Serve as soon as the client is attached. Before, requests would be refused; in the backlog they only wait."""
    await client.attached.wait()
    await server.serve(sockets=[listener])


async def _drain(client: Client) -> None:
    """Wait until running requests have finished and no weight update is open, for the grace at most.

    While the instance stops, connections are still accepted, and their requests get 503: if all servers left the socket
    now, new connections would hang in its backlog, because the supervisor keeps it open.
    """
    deadline = time.monotonic() + client.grace
    while (client.num_in_flight or client.state.open_update is not None) and time.monotonic() < deadline:
        await asyncio.sleep(DRAIN_POLL_SECONDS)
