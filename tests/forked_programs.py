"""Processes of tests as forks of one that has imported torch, which takes a fresh process two seconds of a core.

A run of end-to-end tests starts hundreds of engines, workers and servers. Here they are forks of one fork server of the
process that runs the tests (`eagleray/process/forking.py`), as engines of an instance are after its first start. What a
fork would not inherit in the same way, such as a variable that a test sets, has the process started fresh.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from processes import hidden_children

from eagleray.cli.main import main
from eagleray.fleet import supervisor
from eagleray.fleet.launcher import ENGINE_MODULES, ProcessLauncher
from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.process import fork_server, fork_server_keeper
from eagleray.process.child_process import ForkedProcess
from eagleray.process.fork_server import BrokenForkServer, ForksChildren, ForkServer, NoFork
from eagleray.process.fork_server_keeper import start_fork_server
from eagleray.process.host_gpus import num_visible_gpus
from eagleray.process.inherited_state import InheritedState, read_inherited_state
from eagleray.process.parent import Parent
from eagleray.process.program import child_words, fork_server_words
from eagleray.process.spawn_protocol import GROUP_SIGNALS, SpawnSpec, write_frame

MODULES = (*ENGINE_MODULES, "eagleray.cli.serve", "forked_programs")
IMPORT_SECONDS = 120.0
TEST_VARIABLE = b"PYTEST_CURRENT_TEST"
"""Variable in which pytest writes the name of each test; no process reads it."""
NO_LOG = LogSettings(format="none")

_servers: list[LastingForkServer] = []
"""The fork server of this process, if one runs."""


class LastingForkServer:
    """A fork server that stays when a fork would inherit something else than a process that is started fresh. One that
    answers too late is given up: its late answer would be taken for the next one."""

    def __init__(self, server: ForkServer, state: InheritedState) -> None:
        self._server, self._state, self._is_given_up = server, state, False

    def fork(self, child_socket: socket.socket, words: Sequence[str], pass_fds: Sequence[int]) -> int:
        """See `ForksChildren`."""
        if self._is_given_up or fork_server.read_inherited_state() != self._state:
            raise NoFork("the process has to be started fresh")
        try:
            return self._server.fork(child_socket, words, pass_fds)
        except BrokenForkServer:
            self._is_given_up = True
            self._server.process.kill()
            raise


def fork_server_of_tests() -> ForksChildren | None:
    """Return the fork server of this process; None: processes are started fresh."""
    return _servers[0] if _servers else None


@contextmanager
def fork_server_running() -> Iterator[None]:
    """Fork the engines of this process within the block, and what asks for `fork_server_of_tests`."""
    if sys.platform != "linux" or num_visible_gpus():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for module in (fork_server, fork_server_keeper):
            patch.setattr(module, "read_inherited_state", _state_without_test)
        with pytest.MonkeyPatch.context() as start:
            start.setattr(fork_server_keeper, "fork_server_words", _words_of_server)
            server = start_fork_server(MODULES)
        try:
            server.wait_until_ready(IMPORT_SECONDS)
            hidden_children.add(server.process.pid)
            _fork_engines(LastingForkServer(server, server._state), patch.setattr)
            yield
        finally:
            _servers.clear()
            hidden_children.clear()
            server.close()


def _words_of_server(descriptor: int, modules: Sequence[str]) -> list[str]:
    """Return the command line of a fork server that imports before it becomes one. Otherwise the import would yield to
    all other tests."""
    first, imports = "from eagleray.process.child", f"import {', '.join(modules)}"
    return [word.replace(first, f"{imports}; {first}") for word in fork_server_words(descriptor, modules)]


def _state_without_test() -> InheritedState:
    state = read_inherited_state()
    others = {name: value for name, value in state.environment.items() if name != TEST_VARIABLE}
    return msgspec.structs.replace(state, environment=others)


def _fork_engines(server: LastingForkServer, setattr: Callable[[Any, str, object], None]) -> None:
    """Have the supervisors of this process fork their engines, unless an instance has a fork server of its own."""
    _servers.append(server)

    def launcher(*, fork_server: ForksChildren | None, **options: str) -> ProcessLauncher:
        return ProcessLauncher(fork_server=fork_server or server, **options)

    setattr(supervisor, "ProcessLauncher", launcher)


class ForkedProgram:
    """A fork that runs the command line of eagleray, with the methods of `subprocess.Popen` that tests use.

    Its standard input is empty.
    """

    def __init__(self, arguments: Sequence[str], server: ForksChildren, *, stdout: int | None, stderr: int) -> None:
        """`stdout` and `stderr` are descriptors; None stands for this process's. Raises `NoFork` if the program has to
        be started fresh."""
        self.returncode: int | None = None
        self._socket, theirs = socket.socketpair()
        outputs = [stderr] if stdout is None else [stderr, stdout]
        with theirs:
            try:
                self.pid = server.fork(theirs, child_words(theirs.fileno(), "program"), outputs)
            except BaseException:
                self._socket.close()
                raise
        self._process = ForkedProcess(self.pid)
        self._pidfd = os.pidfd_open(self.pid)
        spec = SpawnSpec(
            target="forked_programs:run_program",
            member=ClientId("program", 0),
            log=NO_LOG,
            payload=json.dumps([outputs, arguments]).encode(),
            runtime_dir="",
            has_children=True,
        )
        write_frame(self._socket, msgspec.msgpack.encode(spec))

    def poll(self) -> int | None:
        """Return the exit code, or None if the process runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = self._process.wait()
            os.close(self._pidfd)
            self._socket.close()
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Return the exit code. Raises `TimeoutExpired`."""
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            select.select([self._pidfd], [], [], max(0.0, deadline - time.monotonic()))
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("eagleray", timeout)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def run_program(payload: bytes, parent: Parent) -> None:
    """Run the command line of eagleray in a fork, whose engines become forks of its own fork server."""
    outputs, arguments = json.loads(payload)
    for output, number in zip(outputs, (2, 1), strict=False):
        os.dup2(output, number)
        os.close(output)
    for number in GROUP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[:] = ["eagleray", *arguments]
    if (server := parent.fork_server) is not None:
        server._state = read_inherited_state()  # signals have changed
        _fork_engines(LastingForkServer(server, server._state), setattr)
    sys.exit(main(arguments))
