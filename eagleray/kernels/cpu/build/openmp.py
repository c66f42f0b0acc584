"""The OpenMP runtime that torch computes with in this process, whose threads our kernels share.

Torch brings its own libgomp. A second runtime beside it would have a second set of threads, which spin on the same
cores. A user may also have loaded Intel's or LLVM's runtime before torch's (LD_PRELOAD): they define GNU's symbols too,
and then torch's own is mapped but idle. So the runtime in use is the one that the symbols resolve to.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagleray.errors import EagleRayError

MAPS = Path("/proc/self/maps")

RUNTIME = re.compile(r"lib(gomp|omp|iomp5)[-.]")
"""File names: libgomp.so.1, libgomp-a34b3233.so.1.0.0, libomp.so.5, libiomp5.so."""


class NativeUnavailable(EagleRayError):
    """Kernels cannot be compiled or loaded on this machine. The message gives the reason and what to do. Torch can
    compute instead."""


@dataclass(frozen=True)
class OpenmpRuntime:
    path: Path
    serves_clang: bool
    """Whether code compiled by clang can use it. Code compiled by GCC can use any runtime."""


def openmp_runtime() -> OpenmpRuntime:
    """Return the runtime in use; torch must have been imported. Raises `NativeUnavailable` if it cannot be found or is
    ambiguous."""
    path = _file_of("GOMP_parallel")
    if path is None:  # no global symbol: torch's own runtime is private, so look for it by file name
        hidden = mapped_runtimes()
        if len(hidden) != 1:
            found = ", ".join(map(str, sorted(hidden))) or "none"
            raise NativeUnavailable(
                f"torch's OpenMP runtime was not found among those of this process (found: {found})"
            )
        (path,) = hidden
    if not path.is_file():
        raise NativeUnavailable(f"the OpenMP runtime {path} was replaced while this process ran: start it again")
    return OpenmpRuntime(path, serves_clang=_file_of("__kmpc_fork_call") == path)


def mapped_runtimes() -> frozenset[Path]:
    """Return the files of all OpenMP runtimes that this process has loaded."""
    return frozenset(path for _, _, path in _mappings() if RUNTIME.match(path.name))


def _file_of(symbol: str) -> Path | None:
    """Return the library that a global symbol resolves to, or None if it is undefined."""
    try:
        address = ctypes.cast(getattr(ctypes.CDLL(None), symbol), ctypes.c_void_p).value or 0
    except AttributeError:
        return None
    return next((path for begin, end, path in _mappings() if begin <= address < end), None)


def _mappings() -> Iterator[tuple[int, int, Path]]:
    try:
        lines = MAPS.read_text().splitlines()
    except FileNotFoundError:
        raise NativeUnavailable("compiled kernels need Linux: there is no /proc here") from None
    for line in lines:
        addresses, *_, path = line.split(maxsplit=5)
        if path.startswith("/"):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16), Path(path)
