"""Finds a C++ compiler for the kernels and runs it: GCC, also one for another architecture.

Nothing here imports torch, because a wheel is built without it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eagleray.kernels.cpu.build.openmp import NativeUnavailable

NAMES = ("c++", "g++")

ARCHITECTURE = re.compile(r"#define __(x86_64|aarch64)__ ")
"""Macros that name an architecture as `uname -m` does."""

FLAGS = (
    *("-O3", "-std=c++17", "-ffp-contract=fast", "-fno-math-errno", "-Wno-psabi"),
    *("-fPIC", "-fvisibility=hidden"),
)

LINK_FLAGS = ("-shared", "-Wl,--no-undefined")

ADVICE = "install GCC 10 or newer (on Debian and Ubuntu: apt install g++)"

COMMAND_SECONDS = 300.0
"""Time limit of one run of the compiler, which takes up to 20 s of a core."""

ERROR = re.compile(r"error:|undefined reference|cannot find")


@dataclass(frozen=True)
class Compiler:
    command: tuple[str, ...]
    flags: tuple[str, ...]
    macros: str
    """The compiler's predefined macros. They tell its version and the features of the target processor."""

    @property
    def is_clang(self) -> bool:
        return "#define __clang__ " in self.macros

    @property
    def architecture(self) -> str | None:
        """Name of the architecture that it compiles for, or None if there are no variants for it."""
        match = ARCHITECTURE.search(self.macros)
        return match and match[1]


def find_compiler(wanted: str | None, target: Sequence[str] = ()) -> Compiler:
    """Return the compiler that the user wants, or the first one that compiles the kernels.

    `target` are the flags for a processor; without any, the compiler's default. Raises `NativeUnavailable`.
    """
    commands = [wanted.split()] if wanted else [[name] for name in NAMES]
    refusals = []
    for command in commands:
        if shutil.which(command[0]) is None:
            continue
        try:
            compiler = _probe(command, (*FLAGS, *target))
        except NativeUnavailable as refusal:
            refusals.append(str(refusal))
            continue
        if not compiler.is_clang:
            return compiler
        refusals.append(f"{command[0]} is clang, and the kernels are written for GCC: {ADVICE}")
    if refusals:
        raise NativeUnavailable(refusals[0])
    looked_for = f"{commands[0][0]}, which CXX names" if wanted else ", ".join(NAMES)
    raise NativeUnavailable(f"there is no C++ compiler on PATH (looked for {looked_for}): {ADVICE}")


def compile_library(
    compiler: Compiler,
    sources: Iterable[str],
    *,
    directory: Path,
    on_compiled: Callable[[], object] = lambda: None,
) -> Path:
    """Compile files of `directory` in parallel and link them. Returns the library, in `directory`.

    `on_compiled` is called after each file.
    """
    objects = {source: f"{source}.o" for source in sources}
    compile_one = (*compiler.command, *compiler.flags, "-c")
    compilers = _Compilers()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [
            pool.submit(compilers.run, (*compile_one, source, "-o", made), directory)
            for source, made in objects.items()
        ]
        try:
            for run in as_completed(runs):
                run.result()
                on_compiled()
        except BaseException:  # also the exit of this process, which would wait for the threads
            pool.shutdown(wait=False, cancel_futures=True)
            compilers.kill()
            raise
    link = (*compiler.command, *LINK_FLAGS, *objects.values(), "-o", "linked.so")
    _Compilers().run(link, directory)
    return directory / "linked.so"


def _probe(command: Sequence[str], flags: tuple[str, ...]) -> Compiler:
    macros = _Compilers().run((*command, *flags, "-E", "-dM", "-x", "c++", os.devnull), None)
    return Compiler(tuple(command), flags, macros)


class _Compilers:
    """Compilers that run at the same time. Each has a process group of its own, because it starts programs that a
    signal for it would leave running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False

    def run(self, command: Sequence[str], directory: Path | None) -> str:
        """Run a compiler and return its standard output. Raises `NativeUnavailable` with its first error."""
        try:
            process = self._start(command, directory)
        except OSError as error:
            raise NativeUnavailable(f"{command[0]} cannot be run ({error.strerror}): {ADVICE}") from error
        with process:
            try:
                output, errors = process.communicate(timeout=COMMAND_SECONDS)
            except BaseException as error:
                _kill(process)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                words = shlex.join(command)
                raise NativeUnavailable(f"the compiler took longer than {COMMAND_SECONDS:.0f} s: {words}") from None
            finally:
                with self._lock:
                    self._running.discard(process)
        if process.returncode != 0:
            reason = _first_error(errors, process.returncode)
            raise NativeUnavailable(f"{command[0]} failed with `{reason}`: {ADVICE}, or fix CXX")
        return output

    def _start(self, command: Sequence[str], directory: Path | None) -> subprocess.Popen[str]:
        with self._lock:
            if self._is_closed:
                raise NativeUnavailable("the compilation was given up")
            process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                process_group=0,
            )
            self._running.add(process)
        return process

    def kill(self) -> None:
        """Kill the running compilers and refuse to start others."""
        with self._lock:
            self._is_closed = True
            for process in self._running:
                _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _first_error(output: str, code: int) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    no_error = lines[0] if lines else f"exit status {code}"
    return next((line for line in lines if ERROR.search(line)), no_error)
