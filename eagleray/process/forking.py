"""The fork server's side: fork a child for each request. Driven by `child`, in a process with a single thread."""

from __future__ import annotations

import importlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Sequence
from fcntl import F_DUPFD_CLOEXEC, fcntl
from pathlib import Path
from typing import NoReturn

import msgspec

from eagleray.process.command_line import show_command_line
from eagleray.process.fork_protocol import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    ChildForked,
    ForkFailed,
    ForkRequest,
    FromForkServer,
    ServerReady,
    ServerUnusable,
)
from eagleray.process.gc_freeze import freeze_gc

POLL_SECONDS = 1.0

ADOPTION_SECONDS = 1.0
"""Time within which the kernel makes a child that of the process that asked for it."""

THREAD_EXIT_SECONDS = 10.0
"""Time for threads that have ended to disappear: they yield to everything else, as the one that imported."""

IMPORT_NICE = 10
"""Nice value of the thread that imports, so that requests keep most of the cores meanwhile. A process that is not
privileged could not lower its own again, but values are those of threads."""


def import_modules(sock: socket.socket, modules: Sequence[str]) -> None:
    """Import `modules` and report that the process is ready; exit if it cannot be."""
    failures: list[Exception] = []

    def run() -> None:
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), IMPORT_NICE)
            for module in modules:
                importlib.import_module(module)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="import")
    thread.start()
    thread.join()
    freeze_gc()  # a collection in a child would copy every page that has objects
    _end_library_threads()
    if failures:
        _exit_unusable(sock, f"{type(failures[0]).__name__}: {failures[0]}")
    deadline = time.monotonic() + THREAD_EXIT_SECONDS
    while (count := len(list(Path("/proc/self/task").iterdir()))) > 1:
        if time.monotonic() > deadline:
            _exit_unusable(sock, f"a library has {count - 1} threads, which a fork would lack")
        time.sleep(0.01)
    _send(sock, ServerReady())


def _end_library_threads() -> None:
    """End the threads that numpy's OpenBLAS starts when it is imported: it ends them before a fork, and each process
    starts its own when it multiplies."""
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def _exit_unusable(sock: socket.socket, reason: str) -> NoReturn:
    _send(sock, ServerUnusable(reason))
    os._exit(1)


def serve_forks(sock: socket.socket, owner: int) -> socket.socket:
    """Fork a child for each request of the process `owner`; return in a child, with the child's end of its socket pair.

    The process itself exits when `owner` has closed the socket or has exited.
    """
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    while True:
        if os.getppid() != owner:  # a fork of the owner may keep the socket open
            os._exit(0)
        if not poller.poll(POLL_SECONDS * 1000):
            continue
        packet, descriptors, _, _ = socket.recv_fds(sock, MAX_PACKET_BYTES, MAX_DESCRIPTORS)
        if not packet:
            os._exit(0)
        request = msgspec.msgpack.decode(packet, type=ForkRequest)
        try:
            is_child = _fork_orphan()
        except OSError as error:
            _send(sock, ForkFailed(f"fork: {error.strerror}"))
            is_child = False
        if is_child:
            return _become_child(sock, owner, request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_orphan() -> bool:
    """Fork a process whose parent exits at once, so that the kernel gives it to the nearest subreaper, which is the
    process that asked for it. Return True in the new process and False in the server. Raises `OSError` in the server
    if the system refuses a fork."""
    if between := os.fork():
        _, status = os.waitpid(between, 0)
        if number := os.waitstatus_to_exitcode(status):
            raise OSError(number, os.strerror(number) if number > 0 else "the process between was killed")
        return False
    try:
        forked = os.fork()
    except OSError as error:
        os._exit(error.errno or 1)
    if forked:
        os._exit(0)
    return True


def _become_child(sock: socket.socket, owner: int, request: ForkRequest, descriptors: Sequence[int]) -> socket.socket:
    """Take on the descriptors and the command line of a child, and report it."""
    try:
        deadline = time.monotonic() + ADOPTION_SECONDS
        while os.getppid() != owner:
            if time.monotonic() > deadline:
                raise OSError("the kernel gave the child to another process")
            time.sleep(0.0002)
        sock, child_socket = _install(sock, request.numbers, descriptors)
        show_command_line(request.words)
        sys.argv[:] = ["-c", *request.words[-2:]]
        _separate_random_state()
    except Exception as error:
        _send(sock, ForkFailed(f"{type(error).__name__}: {error}"))
        os._exit(1)
    _send(sock, ChildForked(os.getpid()))
    sock.close()
    return child_socket


def _install(
    sock: socket.socket, numbers: Sequence[int], descriptors: Sequence[int]
) -> tuple[socket.socket, socket.socket]:
    """Give the descriptors the numbers that they have in the owner; the child's socket and that of the server may have
    any others. Return the server's socket and the child's."""
    free = max((2, *numbers)) + 1
    server, child, *others = [fcntl(number, F_DUPFD_CLOEXEC, free) for number in (sock.fileno(), *descriptors)]
    sock.close()
    for number in descriptors:
        os.close(number)
    for source, number in zip(others, (1, 2, *numbers), strict=True):
        os.dup2(source, number)  # makes it inheritable
        os.close(source)
    if sys.stdout is not None:
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]  # a file, as it is not replaced
    return socket.socket(fileno=server), socket.socket(fileno=child)


def _separate_random_state() -> None:
    """Replace random state that all forks would share. Python's `random` does so itself, and torch's generators have
    the same seed in every new process."""
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (processes := sys.modules.get("multiprocessing.process")) is not None:
        processes.current_process().authkey = os.urandom(32)


def _send(sock: socket.socket, message: FromForkServer) -> None:
    try:
        sock.send(msgspec.msgpack.encode(message))
    except OSError:  # the owner has exited or has given up this server
        os._exit(1)
