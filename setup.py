"""Compiles the kernels for CPUs into wheels, one library for each variant; see docs/building.md.

The rest of the package's configuration is in pyproject.toml. An editable installation compiles nothing: its kernels are
compiled for the machine's processor when they are first used.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.absolute()
sys.path.insert(0, str(ROOT))

from eagleray.config.environment import build_settings  # noqa: E402
from eagleray.kernels.cpu.build.cache import seal  # noqa: E402
from eagleray.kernels.cpu.build.compiler import Compiler, find_compiler  # noqa: E402
from eagleray.kernels.cpu.build.openmp import NativeUnavailable  # noqa: E402
from eagleray.kernels.cpu.build.sources import SOURCE_DIRECTORY, LibrarySources  # noqa: E402
from eagleray.kernels.cpu.build.variants import Variant, variants_of  # noqa: E402


@cache
def wheel_compiler() -> Compiler | None:
    """Return the compiler that the user chose or the first that works, or None for a wheel without libraries."""
    try:
        compiler = find_compiler(build_settings().compiler)
    except NativeUnavailable as error:
        print(f"warning: this wheel gets no prebuilt kernels: {error}", file=sys.stderr)
        return None
    return compiler if compiler.architecture and sys.platform == "linux" else None


def compile_kernels(variant: Variant, directory: Path) -> Path:
    """Compile a library in an empty directory. Ends the build with one sentence if that fails."""
    try:
        compiler = find_compiler(build_settings().compiler, variant.flags)
        library = LibrarySources.read(sorted(SOURCE_DIRECTORY.glob("*.cpp"))).compile(compiler, directory)
    except NativeUnavailable as error:
        raise SystemExit(f"the kernels for {variant.name} cannot be compiled: {error}") from None
    seal(library)
    return library


class BuildKernels(Command):
    """Compiles a library for each variant of the compiler's architecture."""

    editable_mode = False
    """Whether setuptools makes an editable installation."""

    def initialize_options(self) -> None:
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build", ("build_lib", "build_lib"))

    def run(self) -> None:
        for variant in self._variants():
            self.announce(f"compiling kernels for {variant.name}", level=2)
            self.mkpath(str(self._target(variant).parent))
            with TemporaryDirectory() as directory:
                library = compile_kernels(variant, Path(directory))
                self.copy_file(str(library), str(self._target(variant)))

    def get_source_files(self) -> list[str]:
        return []  # they are data of the package

    def get_outputs(self) -> list[str]:
        return [str(self._target(variant)) for variant in self._variants()]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def _variants(self) -> Iterator[Variant]:
        if not self.editable_mode and (compiler := wheel_compiler()):
            yield from variants_of(compiler.architecture)

    def _target(self, variant: Variant) -> Path:
        return Path(self.build_lib, variant.prebuilt.relative_to(ROOT))


class PlatformDistribution(Distribution):
    """A distribution that belongs to a platform if it has libraries."""

    def has_ext_modules(self) -> bool:
        return wheel_compiler() is not None


class PlatformWheel(bdist_wheel):
    """A wheel for every Python of one platform: the libraries do not use Python's interface."""

    def get_tag(self) -> tuple[str, str, str]:
        if (compiler := wheel_compiler()) is None:
            return super().get_tag()
        return "py3", "none", f"linux_{compiler.architecture}"


build.sub_commands.append(("build_kernels", None))
setup(
    cmdclass={"build_kernels": BuildKernels, "bdist_wheel": PlatformWheel},
    distclass=PlatformDistribution,
)
