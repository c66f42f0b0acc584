"""Compile the kernels that `make test` uses, into the user's cache, with the standard library alone.

    python scripts/compile_kernels.py

It takes the compiler as long as the installation of the packages takes pip, so `make test` runs both at the same time.
What it compiles for nothing or leaves out costs time alone: whatever is missing is compiled when it is first used.
"""

from __future__ import annotations

import platform
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from eagleray.config.environment import build_settings  # noqa: E402
from eagleray.kernels.cpu.build.cache import cached_file  # noqa: E402
from eagleray.kernels.cpu.build.compiler import find_compiler  # noqa: E402
from eagleray.kernels.cpu.build.matrix_registers import REFUSED_FLAGS, request_matrix_registers  # noqa: E402
from eagleray.kernels.cpu.build.openmp import NativeUnavailable  # noqa: E402
from eagleray.kernels.cpu.build.sources import SOURCE_DIRECTORY, LibrarySources  # noqa: E402
from eagleray.kernels.cpu.build.variants import NATIVE_FLAGS, VARIANTS  # noqa: E402


def main() -> int:
    """Compile the kernels for this processor and for the other one whose kernels its tests run too."""
    settings = build_settings()
    if settings.cache_directory is None:
        print("there is no cache directory to compile into; set EAGLERAY_CACHE_DIR", file=sys.stderr)
        return 0
    library = LibrarySources.read(sorted(SOURCE_DIRECTORY.glob("*.cpp")))
    try:
        for flags in wanted_flags():
            compiler = find_compiler(settings.compiler, flags)
            name = f"kernels-{library.key(compiler)}.so"
            cached_file(settings.cache_directory / "kernels", name, partial(library.compile, compiler))
    except (NativeUnavailable, OSError) as error:
        print(f"kernels are compiled when tests need them, or torch computes: {error}", file=sys.stderr)
    return 0


def wanted_flags() -> list[tuple[str, ...]]:
    """Return the compiler's flags for this processor, and for the variant in `tests/unit/kernels/conftest.py`."""
    if platform.machine() != "x86_64":
        return [NATIVE_FLAGS]
    flags = Path("/proc/cpuinfo").read_text().partition("\nflags")[2].partition("\n")[0].split()
    has_matrices = "amx_bf16" in flags
    is_allowed = has_matrices and request_matrix_registers()
    native = (*NATIVE_FLAGS, *REFUSED_FLAGS) if has_matrices and not is_allowed else NATIVE_FLAGS
    other = "avx512_bf16" if is_allowed else "avx2"
    return [native, *(variant.flags for variant in VARIANTS if variant.name == other)]


if __name__ == "__main__":
    sys.exit(main())
