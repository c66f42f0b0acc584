"""Finds a C++ compiler for the kernels and runs it: GCC, also one for another architecture.

Nothing here imports torch, because a wheel is built without it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
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

COMMAND_SECONDS = 120.0
"""Time limit of one run of the compiler, which takes a few seconds on an idle machine."""

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
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        runs = [pool.submit(_run, (*compile_one, source, "-o", made), directory) for source, made in objects.items()]
        try:
            for run in as_completed(runs):
                run.result()
                on_compiled()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    link = (*compiler.command, *LINK_FLAGS, *objects.values(), "-o", "linked.so")
    _run(link, directory)
    return directory / "linked.so"


def _probe(command: Sequence[str], flags: tuple[str, ...]) -> Compiler:
    macros = _run((*command, *flags, "-E", "-dM", "-x", "c++", os.devnull), None)
    return Compiler(tuple(command), flags, macros)


def _run(command: Sequence[str], directory: Path | None) -> str:
    """Return the compiler's standard output. Raises `NativeUnavailable` with its first error."""
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMMAND_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise NativeUnavailable(
            f"the compiler took longer than {COMMAND_SECONDS:.0f} s: {shlex.join(command)}"
        ) from None
    except OSError as error:
        raise NativeUnavailable(f"{command[0]} cannot be run ({error.strerror}): {ADVICE}") from error
    if done.returncode != 0:
        raise NativeUnavailable(f"{command[0]} failed with `{_first_error(done)}`: {ADVICE}, or fix CXX")
    return done.stdout


def _first_error(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    no_error = lines[0] if lines else f"exit status {done.returncode}"
    return next((line for line in lines if ERROR.search(line)), no_error)
