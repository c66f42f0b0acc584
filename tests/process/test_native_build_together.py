"""Processes that build the same kernels at once, are killed while they build, or have another OpenMP runtime."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SECONDS = 120.0

BUILD = """
import sys
from pathlib import Path
from eagleray.kernels.cpu.build.library import build, load

print("ready", flush=True)
sys.stdin.readline()
print(load(build([Path(sys.argv[1])])).answer(), flush=True)
"""

RUNTIME = """
import ctypes
import torch
from eagleray.kernels.cpu.build.openmp import mapped_runtimes, openmp_functions

parallel, *_ = openmp_functions()
work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: None)
ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 2, *[ctypes.c_uint] * 2)(parallel)(work, None, 1, 0)
print(len(mapped_runtimes()))
"""

COMPILER = """#!/bin/sh
# Logs each run. If there is a file `hold`, the first run hangs, and says who called it.
here=$(dirname "$0")
case "$*" in *" -c "*)
    echo "$*" >> $here/runs
    if mv $here/hold $here/held 2> /dev/null; then
        echo "$PPID $$" > $here/holder.new
        mv $here/holder.new $here/holder
        exec sleep 600
    fi
esac
exec g++ "$@"
"""


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text("""extern "C" __attribute__((visibility("default"))) int answer() { return 42; }""")
    return path


@pytest.fixture
def start(tmp_path):
    """Return a function that starts a program in a process of its own, with a compiler that logs its calls."""
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    own = {"CXX": str(compiler), "EAGLERAY_CACHE_DIR": str(tmp_path / "cache")}
    processes = []

    def start(program: str, argument: Path, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(argument)],
            env={**os.environ, **own, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def start_together(start, source: Path) -> list[subprocess.Popen[str]]:
    """Start four processes that begin to build when all have finished their imports."""
    processes = [start(BUILD, source) for _ in range(4)]
    for process in processes:
        assert select.select([process.stdout], [], [], SECONDS)[0], "a process did not get ready"
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def libraries(cache: Path) -> list[str]:
    return [path.suffix for path in (cache / "kernels").iterdir() if path.suffix != ".lock"]


@pytest.mark.grid  # the next test has them compile, too
def test_four_processes_compile_once(start, source, tmp_path):
    for process in start_together(start, source):
        assert process.communicate(timeout=SECONDS) == ("42\n", "")
    assert len((tmp_path / "runs").read_text().splitlines()) == 1
    assert libraries(tmp_path / "cache") == [".so"]


def test_native_build_killed_compiler_is_replaced_by_another(start, source, tmp_path):
    (tmp_path / "hold").touch()
    processes = start_together(start, source)
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "holder").exists():
        assert time.monotonic() < deadline, "nobody began to compile"
        time.sleep(0.02)
    builder, compiler = map(int, (tmp_path / "holder").read_text().split())
    try:
        (killed,) = [process for process in processes if process.pid == builder]
        killed.kill()
        for process in processes:
            if process is not killed:
                assert process.communicate(timeout=SECONDS) == ("42\n", "")
    finally:
        os.kill(compiler, signal.SIGKILL)
    assert len((tmp_path / "runs").read_text().splitlines()) == 2
    assert libraries(tmp_path / "cache") == [".so"]


def test_openmp_functions_of_a_preloaded_runtime_are_used(start, tmp_path):
    """The preloaded runtime exports GNU's names, as Intel's does. Torch's own is mapped too, but unused."""
    source, runtime = tmp_path / "runtime.c", tmp_path / "libiomp5.so"
    source.write_text("""#include <stdio.h>
      void GOMP_parallel(void (*work)(void*), void* data, unsigned num_threads, unsigned flags) {
        puts("preloaded");
        fflush(stdout);
      }""")
    command = ["gcc", "-shared", "-fPIC", str(source), "-Wl,-soname,libiomp5.so", "-o", str(runtime)]
    subprocess.run(command, check=True, timeout=SECONDS)
    said, errors = start(RUNTIME, source, LD_PRELOAD=str(runtime)).communicate(timeout=SECONDS)
    assert (said, errors) == ("preloaded\n2\n", "")
