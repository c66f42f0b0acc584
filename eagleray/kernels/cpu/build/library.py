"""The library of the kernels in `../csrc/`, for this machine's processor.

A wheel has a prebuilt library for each variant of `variants.py`. In a source tree, and where no prebuilt one can be
used, the system's C++ compiler makes one for this processor at first use, which may take half a minute, and it is kept
in the user's cache directory. The sources include no header of torch, but the library shares torch's OpenMP threads. So
torch is imported first, and settings of these threads (`config/environment.py`) have to be made before that.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagleray.config.environment import build_settings
from eagleray.errors import DeadlineExceeded
from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.build.cache import cached_file, is_whole, private_directory
from eagleray.kernels.cpu.build.compiler import find_compiler
from eagleray.kernels.cpu.build.openmp import NativeUnavailable, openmp_functions
from eagleray.kernels.cpu.build.processor import native_flags, processor_capabilities
from eagleray.kernels.cpu.build.sources import SOURCE_DIRECTORY, LibrarySources
from eagleray.kernels.cpu.build.variants import NATIVE_FLAGS, Variant, best_variant, named_variant
from eagleray.log import get_logger, has_bars, open_bar

logger = get_logger(__name__)

TEMPORARY = None
"""Stands for the user's directory among the temporary files, for when the cache directory cannot be written."""


@functools.cache
def native_library() -> ctypes.CDLL:
    """Return all kernels for this processor, with typed functions. Raises `NativeUnavailable`, and `ConfigError` if
    EAGLERAY_CPU_KERNELS names kernels that this processor cannot run."""
    architecture, capabilities = platform.machine(), processor_capabilities()
    wanted = build_settings().kernels
    variant = named_variant(wanted, architecture, capabilities) if wanted else best_variant(architecture, capabilities)
    if variant and variant.prebuilt.exists():
        try:
            library = open_prebuilt(variant.prebuilt)
        except NativeUnavailable as error:
            logger.warning("the prebuilt kernels for %s cannot be used, so they are compiled: %s", variant.name, error)
        else:
            logger.info("using the prebuilt kernels for %s", variant.name)
            return library
    return compiled_library(variant if wanted else None)


def compiled_library(variant: Variant | None) -> ctypes.CDLL:
    """Return all kernels, compiled for a variant or else for this processor. Raises `NativeUnavailable`."""
    target = variant.flags if variant else native_flags(processor_capabilities())
    path = build(sorted(SOURCE_DIRECTORY.glob("*.cpp")), target=target)
    try:
        library = open_library(path)
    except NativeUnavailable as error:
        raise NativeUnavailable(f"{error}; or set EAGLERAY_CACHE_DIR to another directory") from error
    logger.info("using kernels that were compiled for %s", variant.name if variant else "this processor")
    return library


def open_prebuilt(path: Path) -> ctypes.CDLL:
    """Return the kernels of a file that a wheel has installed. Raises `NativeUnavailable`."""
    try:
        is_usable = is_whole(path)
    except OSError as error:
        raise NativeUnavailable(f"{path} cannot be read ({error.strerror})") from error
    if not is_usable:  # loading it could crash the process
        raise NativeUnavailable(f"{path} is damaged: install eagleray again")
    return open_library(path)


def open_library(path: Path) -> ctypes.CDLL:
    """Return the kernels of a file, with typed functions and torch's threads. Raises `NativeUnavailable`."""
    library = abi.declare(load(path))
    library.er_use_openmp(*openmp_functions())
    return library


def build(sources: Sequence[Path], *, target: Sequence[str] = NATIVE_FLAGS, directory: Path | None = None) -> Path:
    """Return the shared library of C++ files, which may include the headers beside them.

    `target` are the compiler's flags for a processor; `directory` keeps the library in place of the user's cache. It is
    compiled unless the same contents have been compiled before, by the same compiler and for the same processor.
    Raises `NativeUnavailable`, and leaves nothing but an empty lock file then.
    """
    settings = build_settings()
    library = LibrarySources.read(sources)
    compiler = find_compiler(settings.compiler, target)
    name = f"kernels-{library.key(compiler)}.so"

    def make(scratch: Path) -> Path:
        started = time.monotonic()
        logger.info("compiling kernels, once; this may take half a minute")
        with open_bar(total=len(sources), desc="compiling kernels", unit="file", is_shown=has_bars()) as bar:
            path = library.compile(compiler, scratch, on_compiled=bar.update)
        logger.info("compiled kernels in %.1f s", time.monotonic() - started)
        return path

    if directory is not None:
        return _keep([directory], name, make)
    cache = settings.cache_directory
    return _keep([TEMPORARY] if cache is None else [cache / "kernels", TEMPORARY], name, make)


def load(path: Path) -> ctypes.CDLL:
    """Load a library. Raises `NativeUnavailable`."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailable(f"the kernels cannot be loaded ({error})") from error


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
