"""The compiled kernels that the modules of this folder test."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator

import pytest
from emulated_library import ADVICE, COMPILER, EmulatedLibrary, build_runner, missing_tools

from eagleray.kernels.cpu.abi import abi
from eagleray.kernels.cpu.build.library import build, compiled_library, native_library
from eagleray.kernels.cpu.build.processor import processor_capabilities
from eagleray.kernels.cpu.build.sources import SOURCE_DIRECTORY
from eagleray.kernels.cpu.build.variants import VARIANTS, Variant, best_variant

MACHINE = platform.machine()
OTHER = "avx512_bf16" if best_variant(MACHINE, processor_capabilities()).name == "amx" else "avx2"
"""The variant that `make test` tests beside the processor's own: each takes half a minute to compile, and they share
their parts. The grid has them all."""


def variant_parameter(variant: Variant) -> object:
    marks = []
    if variant.architecture == "aarch64" != MACHINE:
        marks.append(pytest.mark.aarch64)
    elif variant.name != OTHER:
        marks.append(pytest.mark.grid)
    return pytest.param(variant, id=variant.name, marks=marks)


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    """The kernels for this processor."""
    return native_library()


@pytest.fixture(scope="module", params=map(variant_parameter, VARIANTS))
def other_library(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ctypes.CDLL | EmulatedLibrary]:
    """The kernels for another processor than this one. All modules use the same library, compiled once and kept.

    The test is skipped if this processor cannot run them, unless they are for aarch64 and can be emulated, and for the
    best variant, because the kernels that are compiled for this processor have the same instructions.
    """
    variant, capabilities = request.param, processor_capabilities()
    if variant.architecture == "aarch64" != MACHINE:
        if missing := missing_tools():
            pytest.skip(f"lacks {' and '.join(missing)}: {ADVICE}")
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CXX", COMPILER)
            path = build(sorted(SOURCE_DIRECTORY.glob("*.cpp")), target=variant.flags)
        library = EmulatedLibrary(build_runner(tmp_path_factory.mktemp("runner")), path, len(abi.fingerprint))
        yield abi.declare(library)
        library.close()
        return
    if variant.architecture != MACHINE or variant.lacking(capabilities):
        pytest.skip(f"this processor does not run {variant.name}")
    if variant == best_variant(MACHINE, capabilities):
        pytest.skip(f"{variant.name} has the instructions of this processor")
    yield compiled_library(variant)
