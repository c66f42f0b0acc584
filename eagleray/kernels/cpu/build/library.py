"""The library of the kernels in `../csrc/`, compiled for this machine's processor.

The system's C++ compiler makes it at first use, which takes seconds, and it is kept in the user's cache directory. The
sources include no header of torch, but the library shares torch's OpenMP threads. So this module imports torch first,
and settings of these threads (`config/environment.py`) have to be made before this module is imported.
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
from tqdm import tqdm

from eagleray.config.environment import build_settings
from eagleray.errors import DeadlineExceeded
from eagleray.kernels.cpu.abi import HEADER, abi, fingerprint
from eagleray.kernels.cpu.build.cache import cached_file, private_directory
from eagleray.kernels.cpu.build.compiler import LINK_FLAGS, Compiler, compile_library, find_compiler
from eagleray.kernels.cpu.build.openmp import NativeUnavailable, OpenmpRuntime, mapped_runtimes, openmp_runtime
from eagleray.log import get_logger, has_bars

logger = get_logger(__name__)

SOURCE_DIRECTORY = Path(__file__).parent.with_name("csrc")

TEMPORARY = None
"""Stands for the user's directory among the temporary files, for when the cache directory cannot be written."""


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return all kernels for this processor, with typed functions. Raises `NativeUnavailable`."""
    return abi.declare(load(build(sorted(SOURCE_DIRECTORY.glob("*.cpp")))))


def build(sources: Sequence[Path], *, march: str = "native", directory: Path | None = None) -> Path:
    """Return the shared library of C++ files, which may include the headers beside them.

    `march` is the compiler's name of the processor; `directory` keeps the library in place of the user's cache. It is
    compiled unless the same contents have been compiled before, by the same compiler, for the same processor and the
    same OpenMP runtime. Raises `NativeUnavailable`, and leaves nothing but an empty lock file then.
    """
    if not sources:
        raise NativeUnavailable(f"there are no sources of kernels in {SOURCE_DIRECTORY}: install eagleray again")
    settings = build_settings()
    runtime = openmp_runtime()
    compiler = find_compiler(settings.compiler, march=march, runtime=runtime)
    # Copies of these contents are compiled, so a file that changes meanwhile cannot end up under the wrong key.
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
        logger.info("compiling kernels for this processor, once")
        with tqdm(total=len(names), desc="compiling kernels", unit="file", disable=not has_bars()) as bar:
            library = compile_library(compiler, names, directory=scratch, runtime=runtime, on_compiled=bar.update)
        logger.info("compiled kernels in %.1f s", time.monotonic() - started)
        return library

    if directory is not None:
        return _keep([directory], name, make)
    cache = settings.cache_directory
    return _keep([TEMPORARY] if cache is None else [cache / "kernels", TEMPORARY], name, make)


def load(path: Path) -> ctypes.CDLL:
    """Load a library without loading a second OpenMP runtime. Raises `NativeUnavailable`."""
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
    """Return a key that differs whenever the compiled library may. It contains the compiler's macros, which tell the
    features of the processor, so machines can share a cache in a common home directory."""
    digest = hashlib.sha256()
    command = repr((compiler.command, compiler.flags, LINK_FLAGS, names))
    parts = [command.encode(), compiler.macros.encode(), runtime.path.read_bytes()]
    for name in sorted(contents):
        parts += [name.encode(), contents[name]]
    for part in parts:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _keep(directories: Sequence[Path | None], name: str, make: Callable[[Path], Path]) -> Path:
    """Return the cached file in the first of these directories that can be written."""
    refusals = []
    for directory in directories:
        try:
            return cached_file(private_directory() if directory is TEMPORARY else directory, name, make)
        except DeadlineExceeded as error:  # is an OSError, but another directory would not help
            raise NativeUnavailable(f"{error}: end that process, or set EAGLERAY_CACHE_DIR") from error
        except OSError as error:
            refusals.append(str(error))
    tried = "; ".join(refusals)
    raise NativeUnavailable(f"there is nowhere to keep compiled kernels ({tried}): set EAGLERAY_CACHE_DIR")
