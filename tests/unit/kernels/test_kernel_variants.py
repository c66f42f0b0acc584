"""The variant of the kernels that a processor gets, from its features or from a variable."""

from __future__ import annotations

import logging
import platform
import shutil

import pytest
import torch

from eagleray.errors import ConfigError
from eagleray.kernels.cpu.build import library as native
from eagleray.kernels.cpu.build import processor, variants
from eagleray.kernels.cpu.build.library import native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable
from eagleray.kernels.cpu.build.processor import native_flags, processor_capabilities
from eagleray.kernels.cpu.build.variants import AVX2, AVX512, VARIANTS, best_variant, named_variant

HASWELL: dict[str, object] = dict.fromkeys(AVX2, True)
SKYLAKE: dict[str, object] = dict.fromkeys(AVX512, True)
ZEN4 = SKYLAKE | {f"avx512_{part}": True for part in ("bf16", "vbmi", "vnni")} | {"cpu_name": "AMD EPYC"}
ZEN4 |= {"l1d_cache_size": 32768}
SAPPHIRE_RAPIDS = ZEN4 | {"amx_tile": True, "amx_bf16": True, "amx_int8": True, "cpu_name": "Intel Xeon"}


@pytest.fixture
def prebuilt(tmp_path, monkeypatch):
    """The directory of prebuilt libraries, empty; opened and compiled kernels are texts that tell their origin."""
    monkeypatch.setattr(variants, "PREBUILT_DIRECTORY", tmp_path)
    monkeypatch.setattr(native, "open_prebuilt", lambda path: f"opened {path.name}")
    monkeypatch.setattr(native, "compiled_library", lambda variant: f"compiled {variant and variant.name}")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: HASWELL)
    monkeypatch.delenv("EAGLERAY_CPU_KERNELS", raising=False)
    native_library.cache_clear()
    yield tmp_path
    native_library.cache_clear()


@pytest.mark.parametrize(
    ("architecture", "capabilities", "name"),
    [
        ("x86_64", SAPPHIRE_RAPIDS, "amx"),
        ("x86_64", ZEN4, "avx512_bf16"),
        ("x86_64", SKYLAKE, "avx512"),
        ("x86_64", SKYLAKE | {"avx512_bf16": True}, "avx512"),  # Cooper Lake
        ("x86_64", SKYLAKE | {"avx512_vl": False}, "avx2"),  # Xeon Phi
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL | {"fma3": False}, "portable"),
        ("x86_64", {"avx512_bf16": True}, "portable"),
        ("x86_64", {}, "portable"),
        ("aarch64", {"bf16": True}, "neon_bf16"),
        ("aarch64", {"bf16": False}, "neon"),
    ],
)
def test_best_variant_is_the_fastest_that_the_processor_has(architecture, capabilities, name):
    assert best_variant(architecture, capabilities).name == name


def test_best_variant_of_another_architecture_is_none():
    assert best_variant("ppc64le", {}) is None


def test_variant_features_have_the_names_of_torch():
    known = {feature for each in VARIANTS if each.architecture == platform.machine() for feature in each.features}
    assert known <= torch.cpu.get_capabilities().keys()


def test_named_variant_that_the_processor_lacks_is_refused():
    assert named_variant("avx2", "x86_64", ZEN4).name == "avx2"
    assert named_variant("native", "x86_64", ZEN4) is None
    with pytest.raises(
        ConfigError, match="lacks avx512_bf16, avx512_vbmi, avx512_vnni, which avx512_bf16 needs; unset"
    ):
        named_variant("avx512_bf16", "x86_64", SKYLAKE)
    with pytest.raises(ConfigError, match=r"`neon` is none of amx, avx512_bf16, avx512, avx2, portable, native$"):
        named_variant("neon", "x86_64", SKYLAKE)


@pytest.mark.parametrize("is_allowed", [False, True])
def test_processor_has_matrix_instructions_if_the_system_allows_them(monkeypatch, is_allowed):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: SAPPHIRE_RAPIDS)
    monkeypatch.setattr(processor, "request_matrix_registers", lambda: is_allowed)
    capabilities = processor_capabilities()
    assert best_variant("x86_64", capabilities).name == ("amx" if is_allowed else "avx512_bf16")
    assert ("-mno-amx-tile" in native_flags(capabilities)) is not is_allowed


def test_processor_without_matrix_instructions_asks_the_system_for_nothing(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: ZEN4)
    monkeypatch.setattr(processor, "request_matrix_registers", lambda: pytest.fail("asked"))
    assert processor_capabilities() == ZEN4
    assert native_flags(ZEN4) == ("-march=native",)


def test_native_library_of_a_source_tree_is_compiled_for_this_processor(prebuilt):
    assert native_library() == "compiled None"


def test_native_library_of_a_wheel_is_the_best_prebuilt(prebuilt, caplog):
    for variant in VARIANTS:
        variant.prebuilt.touch()
    with caplog.at_level(logging.INFO, "eagleray"):
        assert native_library() == "opened kernels-avx2.so"
    assert caplog.messages == ["using the prebuilt kernels for avx2"]


@pytest.mark.parametrize("is_prebuilt", [False, True])
@pytest.mark.parametrize(("name", "origin"), [("portable", "compiled portable"), ("native", "compiled None")])
def test_native_library_chosen_by_the_variable(prebuilt, monkeypatch, is_prebuilt, name, origin):
    monkeypatch.setenv("EAGLERAY_CPU_KERNELS", name)
    for variant in VARIANTS if is_prebuilt else ():
        variant.prebuilt.touch()
    expected = "opened kernels-portable.so" if is_prebuilt and name == "portable" else origin
    assert native_library() == expected


def test_native_library_that_cannot_be_opened_is_compiled(prebuilt, monkeypatch, caplog):
    def refuse(path):
        raise NativeUnavailable("wrong ELF class")

    monkeypatch.setattr(native, "open_prebuilt", refuse)
    (prebuilt / "kernels-avx2.so").touch()
    assert native_library() == "compiled None"
    assert caplog.messages == ["the prebuilt kernels for avx2 cannot be used, so they are compiled: wrong ELF class"]


@pytest.fixture
def without_compiler(library, tmp_path, monkeypatch):
    """The path of this processor's prebuilt kernels, which are the compiled ones; no compiler is found."""
    best = best_variant(platform.machine(), processor_capabilities())
    monkeypatch.setattr(variants, "PREBUILT_DIRECTORY", tmp_path)
    monkeypatch.delenv("EAGLERAY_CPU_KERNELS", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    shutil.copy(library._name, best.prebuilt)
    native_library.cache_clear()
    yield best.prebuilt
    native_library.cache_clear()


def test_native_library_prebuilt_needs_no_compiler(without_compiler):
    opened = native_library()
    assert opened._name == str(without_compiler)
    assert opened.er_packed_size(33, 2, 0) == 64 * 2


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_native_library_prebuilt_and_truncated_says_what_to_install(without_compiler, caplog, part):
    """The linker of the system maps half a library without an error; its use ends the process with SIGBUS."""
    content = without_compiler.read_bytes()
    without_compiler.write_bytes(content[: int(part * len(content))])
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler on PATH .*: install GCC"):
        native_library()
    assert f"so they are compiled: {without_compiler} is damaged: install eagleray again" in caplog.text


def test_native_library_prebuilt_and_unreadable_is_not_used(without_compiler, caplog):
    without_compiler.unlink()
    without_compiler.mkdir()
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler on PATH"):
        native_library()
    assert f"so they are compiled: {without_compiler} cannot be read (Is a directory)" in caplog.text


def test_native_library_prebuilt_of_another_version_is_not_used(without_compiler, caplog, monkeypatch):
    monkeypatch.setattr(native.abi, "fingerprint", "another")
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler on PATH"):
        native_library()
    assert "so they are compiled: the kernels were compiled with another version of abi.h" in caplog.text
