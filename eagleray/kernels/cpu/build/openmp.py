"""The OpenMP runtime that torch computes with in this process, whose threads our kernels share.

Torch brings its own libgomp. A second runtime beside it would have a second set of threads, which spin on the same
cores. A user may also have loaded Intel's or LLVM's runtime before torch's (LD_PRELOAD): they define GNU's symbols too,
and then torch's own is mapped but idle. So the runtime in use is the one that the symbols resolve to. Some builds of
torch keep their runtime private; then it is found among the mapped files.

The kernels are linked with no runtime: they get the addresses of its functions. A link would name a file, and its name
and place differ between builds of torch.
"""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from eagleray.errors import EagleRayError

MAPS = Path("/proc/self/maps")

RUNTIME = re.compile(r"lib(gomp|omp|iomp5)[-.]")
"""File names: libgomp.so.1, libgomp-a34b3233.so.1.0.0, libomp.so.5, libiomp5.so."""

FUNCTIONS = ("GOMP_parallel", "omp_set_dynamic", "omp_get_num_threads")
"""Names of the arguments of `er_use_openmp`."""


class NativeUnavailable(EagleRayError):
    """Kernels cannot be compiled or loaded on this machine. The message gives the reason and what to do. Torch can
    compute instead."""


def openmp_functions() -> list[int]:
    """Return the addresses of `FUNCTIONS` in the runtime in use; torch must have been imported.

    Raises `NativeUnavailable` if it cannot be found or is ambiguous.
    """
    runtime = ctypes.CDLL(None)
    if not hasattr(runtime, FUNCTIONS[0]):  # no global symbol: torch's own runtime is private
        runtime = _private_runtime()
    try:
        return [ctypes.cast(getattr(runtime, name), ctypes.c_void_p).value or 0 for name in FUNCTIONS]
    except AttributeError as error:
        raise NativeUnavailable(f"torch's OpenMP runtime lacks a function of GNU's ({error})") from None


def mapped_runtimes() -> frozenset[Path]:
    """Return the files of all OpenMP runtimes that this process has loaded."""
    try:
        lines = MAPS.read_text().splitlines()
    except FileNotFoundError:
        raise NativeUnavailable("compiled kernels need Linux: there is no /proc here") from None
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line}
    return frozenset(path for path in paths if RUNTIME.match(path.name))


def _private_runtime() -> ctypes.CDLL:
    runtimes = mapped_runtimes()
    if len(runtimes) != 1:
        found = ", ".join(map(str, sorted(runtimes))) or "none"
        raise NativeUnavailable(f"torch's OpenMP runtime was not found among those of this process (found: {found})")
    (path,) = runtimes
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # another file has this name now
        raise NativeUnavailable(
            f"the OpenMP runtime {path} was replaced while this process ran: start it again"
        ) from None
