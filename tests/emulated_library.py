"""A library of the kernels for aarch64 that runs under an emulator and works on this process's memory.

Tests call it like a library of ctypes: `aarch64/run_calls.cpp` runs each call and maps this process's pages when the
call touches them. Needs qemu-user and a cross compiler.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = 4096
SYSROOT = "/usr/aarch64-linux-gnu"
COMPILER = "aarch64-linux-gnu-g++"
EMULATOR = "qemu-aarch64"
ADVICE = "apt install g++-aarch64-linux-gnu qemu-user"


def missing_tools() -> list[str]:
    return [tool for tool in (COMPILER, EMULATOR) if shutil.which(tool) is None]


def build_runner(directory: Path) -> Path:
    """Compile the program that runs the calls."""
    source, program = Path(__file__).with_name("aarch64") / "run_calls.cpp", directory / "run_calls"
    command = [COMPILER, "-std=c++17", "-O1", "-fopenmp", str(source), "-ldl", "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    return program


class EmulatedLibrary:
    """A library whose functions are called in an emulated process."""

    def __init__(self, runner: Path, library: Path, fingerprint_size: int) -> None:
        self._name = str(library)
        self._process = subprocess.Popen(
            [EMULATOR, "-L", SYSROOT, str(runner), str(library)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self._lock = threading.Lock()  # weights are packed by several threads
        fingerprint = self._read(fingerprint_size)
        self.er_abi_fingerprint = lambda: fingerprint

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._process.stdout.close()
        os.close(self._memory)

    def __getattr__(self, name: str) -> EmulatedFunction:
        function = EmulatedFunction(self, name)
        setattr(self, name, function)
        return function

    def call(self, name: str, integers: Sequence[int], floats: Sequence[float]) -> int:
        """Call a function and apply what it writes to this process's memory."""
        with self._lock:
            return self._call(name, integers, floats)

    def _call(self, name: str, integers: Sequence[int], floats: Sequence[float]) -> int:
        padded = [*integers, *[0] * (16 - len(integers))], [*floats, *[0.0] * (4 - len(floats))]
        self._process.stdin.write(struct.pack("<64s16q4f", name.encode(), *padded[0], *padded[1]))
        self._process.stdin.flush()
        while (kind := self._read(1)) != b"r":
            (address,) = struct.unpack("<q", self._read(8))
            if kind == b"p":
                self._process.stdin.write(os.pread(self._memory, PAGE, address))
                self._process.stdin.flush()
            else:
                (size,) = struct.unpack("<q", self._read(8))
                ctypes.memmove(address, self._read(size), size)
        return struct.unpack("<q", self._read(8))[0]

    def _read(self, size: int) -> bytes:
        content = self._process.stdout.read(size)
        assert len(content) == size, f"{EMULATOR} ended with exit status {self._process.wait(timeout=30)}"
        return content


class EmulatedFunction:
    """A function with the attributes that ctypes has for its types."""

    restype: Any
    argtypes: list[Any]

    def __init__(self, library: EmulatedLibrary, name: str) -> None:
        self._library, self._name = library, name

    def __call__(self, *arguments: Any) -> Any:
        assert len(arguments) == len(self.argtypes)
        integers, floats = [], []
        for argument, kind in zip(arguments, self.argtypes, strict=True):
            if kind is ctypes.c_float:
                floats.append(argument)
            else:
                integers.append(_integer(argument))
        result = self._library.call(self._name, integers, floats)
        return None if self.restype is None else self.restype(result).value


def _integer(argument: Any) -> int:
    """Return a number or an address as an argument in a register."""
    if isinstance(argument, (ctypes.Structure, ctypes.Array)):
        return ctypes.addressof(argument)
    if isinstance(argument, ctypes.c_void_p):
        return argument.value or 0
    return 0 if argument is None else int(argument)
