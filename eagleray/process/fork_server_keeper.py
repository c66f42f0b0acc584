"""An instance's fork server: started in the background, replaced when it is lost. Owned by the supervisor."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Sequence

from eagleray.log import get_logger
from eagleray.process.fork_server import BrokenForkServer, ForkServer, NoFork
from eagleray.process.inherited_state import read_inherited_state
from eagleray.process.program import fork_server_words, group_signals_blocked
from eagleray.process.spawn import explain_exit
from eagleray.process.subreaper import adopting_orphans

logger = get_logger(__name__)

PREPARE_DELAY_SECONDS = 5.0
"""Time that an instance must have served: a program that ends earlier does not pay for a fork server."""

IMPORT_SECONDS = 600.0
"""Time for the imports, which yield to everything else."""

MAX_REPLACEMENTS = 5
REPLACEMENT_DELAY_SECONDS = 1.0
"""Time until the first replacement; doubled for each further one."""

STOP_TIMEOUT_SECONDS = 2.0


class ForkServerKeeper:
    """Keeps one fork server, which imports `modules`. Without one, `fork` raises `NoFork` at once."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._lock = threading.Lock()
        self._server: ForkServer | None = None
        self._fault = ""
        """Reason why the present server was killed by this process; empty: it was not."""
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._ready = threading.Event()

    @property
    def process_id(self) -> int | None:
        """Process id of the server, or None if no server runs."""
        server = self._server
        return None if server is None else server.process.pid

    def prepare(self) -> None:
        """Start a fork server soon. Called again, it does nothing."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="fork-server", daemon=True)
            self._thread.start()

    def wait_until_ready(self, timeout: float) -> bool:
        """Return whether a server is ready within `timeout` seconds."""
        return self._ready.wait(timeout)

    def fork(self, child_socket: socket.socket, words: Sequence[str], pass_fds: Sequence[int]) -> int:
        """See `ForksChildren`."""
        if not self._ready.is_set() or (server := self._server) is None:
            raise NoFork("there is no fork server that is ready")
        try:
            return server.fork(child_socket, words, pass_fds)
        except BrokenForkServer as error:
            self._ready.clear()
            self._fault = str(error)
            server.process.kill()
            raise

    def close(self) -> None:
        """Kill the fork server, which takes milliseconds. Idempotent."""
        self._closing.set()
        with self._lock:
            if self._server is not None:
                self._server.process.kill()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_SECONDS)

    def _keep(self) -> None:
        if self._closing.wait(PREPARE_DELAY_SECONDS):
            return
        for num_replaced in range(1 + MAX_REPLACEMENTS):
            try:
                with adopting_orphans():  # try what every fork needs
                    pass
                reason = self._run_one()
            except (OSError, NoFork) as error:
                logger.warning("there is no fork server, so processes start fresh: %s", error)
                return
            if self._closing.wait(REPLACEMENT_DELAY_SECONDS * 2**num_replaced):
                return
            level = logger.debug if num_replaced else logger.warning
            level("fork server: %s; another one is started, and processes start fresh meanwhile", reason)
        logger.warning("the fork server was lost %d times, so processes start fresh from now on", 1 + MAX_REPLACEMENTS)

    def _run_one(self) -> str:
        """Run a fork server until it exits, and return why. Raises `OSError` if it cannot be started, and
        `NoFork` if it cannot fork."""
        server = start_fork_server(self._modules)
        with self._lock:
            self._server, self._fault = server, ""
            if self._closing.is_set():
                server.process.kill()
        began = time.monotonic()
        try:
            server.wait_until_ready(IMPORT_SECONDS)
            self._ready.set()
            logger.debug("fork server %d is ready after %.1f s", server.process.pid, time.monotonic() - began)
            code = server.process.wait()
            return self._fault or explain_exit(code)
        except BrokenForkServer as error:
            return str(error)
        finally:
            self._ready.clear()
            with self._lock:
                self._server = None
            server.close()


def start_fork_server(modules: Sequence[str]) -> ForkServer:
    """Start a fork server that imports `modules`. Raises `OSError`."""
    state = read_inherited_state()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with theirs, group_signals_blocked():
            process = subprocess.Popen(
                fork_server_words(theirs.fileno(), modules), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
            )
    except BaseException:
        ours.close()
        raise
    return ForkServer(ours, process, state)
