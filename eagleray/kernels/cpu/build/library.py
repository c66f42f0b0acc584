"""The compiled form of the kernels in `../csrc/`, for the processor that this runs on.

They are compiled by the system's C++ compiler at first use, which takes seconds, and kept in the user's cache
directory. The sources include no header of torch's; the library shares torch's OpenMP threads. So torch is imported
before, here, and whoever sets how those threads wait (`config/environment.py`) does so before he imports this.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch  # noqa: F401  its OpenMP runtime is the one to link with

from eagleray.config.environment import build_settings
from eagleray.errors import DeadlineExceeded
from eagleray.kernels.cpu.abi import HEADER, abi, fingerprint
from eagleray.kernels.cpu.build.cache import kept, private_directory
from eagleray.kernels.cpu.build.compiler import LINK_FLAGS, Compiler, compile_library, find_compiler
from eagleray.kernels.cpu.build.openmp import OpenmpRuntime, mapped_runtimes, openmp_runtime
from eagleray.kernels.cpu.build.unavailable import NativeUnavailable
from eagleray.log import get_logger

logger = get_logger(__name__)

NATIVE = Path(__file__).parent.with_name("csrc")

PRIVATE = None
"""Where what is made is kept when the user's cache directory cannot be written: among the temporary files."""


@functools.cache
def native_library() -> ctypes.CDLL:
    """All kernels in `csrc/`, for this processor, with typed functions. Raises `NativeUnavailable`."""
    return abi.declare(load(build(sorted(NATIVE.glob("*.cpp")))))


def build(sources: Sequence[Path], *, march: str = "native", directory: Path | None = None) -> Path:
    """The shared library of these C++ files, which may include the headers that lie beside them.

    `march` is the processor as the compiler names it, `directory` where to keep the library instead of the user's
    cache. It is compiled unless the same contents have been before, with the same compiler for the same processor and
    the same OpenMP runtime. Raises `NativeUnavailable`, and then has left nothing but an empty lock file.
    """
    if not sources:
        raise NativeUnavailable(f"there are no sources of kernels in {NATIVE}: install eagleray again")
    settings = build_settings()
    runtime = openmp_runtime()
    compiler = find_compiler(settings.compiler, march=march, runtime=runtime)
    # What is compiled is what was read here: a file that changes in between cannot end up under the wrong key.
    names = [source.name for source in sources]
    assert len(set(names)) == len(names), "they are compiled in one directory"
    headers = {header for source in sources for header in source.parent.glob("*.h")}
    contents = {path.name: path.read_bytes() for path in (*sources, *sorted(headers))}
    if (interface := contents.get(HEADER.name)) is not None:
        # The library reports the header that is compiled here, which may differ from the one that `abi` read.
        compiler = replace(compiler, flags=(*compiler.flags, f'-DABI_FINGERPRINT="{fingerprint(interface)}"'))
    name = f"kernels-{_key(compiler, runtime, names, contents)}.so"

    def make(scratch: Path) -> Path:
        started = time.monotonic()
        for file, content in contents.items():
            (scratch / file).write_bytes(content)
        library = compile_library(compiler, names, directory=scratch, runtime=runtime)
        logger.info("compiling kernels for this processor, once: %.1f s", time.monotonic() - started)
        return library

    if directory is not None:
        return _keep([directory], name, make)
    cache = settings.cache_directory
    return _keep([PRIVATE] if cache is None else [cache / "kernels", PRIVATE], name, make)


def load(path: Path) -> ctypes.CDLL:
    """The library, loaded into this process without a second OpenMP runtime. Raises `NativeUnavailable`."""
    before = mapped_runtimes()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(
            f"the compiled kernels cannot be loaded ({error}): set EAGLERAY_CACHE_DIR to another directory"
        ) from error
    if second := mapped_runtimes() - before:
        names = ", ".join(map(str, sorted(second)))
        raise NativeUnavailable(f"the compiled kernels brought a second OpenMP runtime ({names}): remove {path}")
    return library


def _key(compiler: Compiler, runtime: OpenmpRuntime, names: Sequence[str], contents: Mapping[str, bytes]) -> str:
    """Differs if the compiled library may. The compiler's macros say what the processor has, as it sees it: a cache
    in a home that machines share is right on each."""
    digest = hashlib.sha256()
    said = repr((compiler.command, compiler.flags, LINK_FLAGS, names))
    parts = [said.encode(), compiler.macros.encode(), runtime.path.read_bytes()]
    for name in sorted(contents):
        parts += [name.encode(), contents[name]]
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _keep(places: Sequence[Path | None], name: str, make: Callable[[Path], Path]) -> Path:
    """Keep what `make` makes in the first of these places that can be written."""
    refusals = []
    for place in places:
        try:
            return kept(private_directory() if place is PRIVATE else place, name, make)
        except DeadlineExceeded as error:  # is an OSError, but another place would not help
            raise NativeUnavailable(f"{error}: end that process, or set EAGLERAY_CACHE_DIR") from error
        except OSError as error:
            refusals.append(str(error))
    tried = "; ".join(refusals)
    raise NativeUnavailable(f"there is nowhere to keep compiled kernels ({tried}): set EAGLERAY_CACHE_DIR")
