"""The C interface of the kernels: `abi` agrees with the compiler; libraries and headers that do not fit are refused."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from eagleray.kernels.cpu.abi import HEADER, CInterface, abi
from eagleray.kernels.cpu.build import library as native
from eagleray.kernels.cpu.build.library import build, load, native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

SMALL = """
#pragma once
#include <stdint.h>

// A comment; with a semicolon.
enum { ONE = 1, TWO };
enum {
  ZERO,
};

typedef struct {
  int64_t count;  // a field
  const float* const* rows;
} CRows;

int64_t er_count(const CRows* rows);
const char* er_abi_fingerprint(void);
void er_use_openmp(void* parallel, void* set_dynamic, void* get_num_threads);
"""

SOURCE = """
#pragma GCC visibility push(default)
extern "C" {
#include "abi.h"
int64_t er_count(const CRows* rows) { return rows->count; }
const char* er_abi_fingerprint() { return ABI_FINGERPRINT; }
void er_use_openmp(void* parallel, void* set_dynamic, void* get_num_threads) {}
}
"""


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """A directory with a small library's source and header, compiled into a cache of its own."""
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    directory = tmp_path / "sources"
    directory.mkdir()
    write(directory / "abi.h", SMALL)
    write(directory / "count.cpp", SOURCE)
    return directory


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def read(text: str) -> CInterface:
    return CInterface(text.encode())


def test_abi_structs_have_the_layout_of_the_compiler(directory):
    structs = abi.structs
    numbers = []
    for name, struct in structs.items():
        numbers += [f"sizeof({name})", *(f"offsetof({name}, {field})" for field, _ in struct._fields_)]
    text = f"""#include <cstddef>
    extern "C" {{
    #include "abi.h"
    __attribute__((visibility("default"))) extern const int64_t layout[] = {{{", ".join(numbers)}}};
    }}"""
    (directory / "count.cpp").unlink()
    shutil.copy(HEADER, directory / "abi.h")
    library = load(build([write(directory / "layout.cpp", text)]))
    expected = []
    for struct in structs.values():
        expected += [ctypes.sizeof(struct), *(getattr(struct, field).offset for field, _ in struct._fields_)]
    assert list((ctypes.c_int64 * len(numbers)).in_dll(library, "layout")) == expected


def test_abi_header_is_plain_c(tmp_path):
    source = write(tmp_path / "header.c", f'#include "{HEADER}"\n')
    command = ["gcc", "-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_abi_small_header_is_read_completely(directory):
    small = read(SMALL)
    assert (small.ONE, small.TWO, small.ZERO) == (1, 2, 0)
    library = small.declare(load(build([directory / "count.cpp"])))
    assert library.er_count(small.CRows(count=1 << 40)) == 1 << 40


def test_native_library_compiled_with_the_same_header_is_loaded(directory, monkeypatch):
    monkeypatch.setattr(native, "SOURCE_DIRECTORY", directory)
    monkeypatch.setattr(native, "abi", read(SMALL))
    native_library.cache_clear()
    try:
        assert native_library().er_count.restype is ctypes.c_int64
    finally:
        native_library.cache_clear()


@pytest.mark.parametrize("read_text", [SMALL.replace("count;", "number;"), SMALL + "\n"])
def test_native_library_compiled_with_another_header_is_refused(directory, monkeypatch, read_text):
    monkeypatch.setattr(native, "SOURCE_DIRECTORY", directory)
    monkeypatch.setattr(native, "abi", read(read_text))
    native_library.cache_clear()
    try:
        with pytest.raises(NativeUnavailable, match=r"compiled with another version of abi.h .*remove .*\.so"):
            native_library()
    finally:
        native_library.cache_clear()


def test_native_library_without_a_fingerprint_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "cache"))
    library = load(build([write(tmp_path / "old.cpp", 'extern "C" int answer() { return 42; }')]))
    with pytest.raises(NativeUnavailable, match="another version"):
        abi.declare(library)


def test_native_library_whose_header_changed_is_compiled_again(directory):
    first = build([directory / "count.cpp"])
    write(directory / "abi.h", SMALL + "// another comment\n")
    assert build([directory / "count.cpp"]) != first


def test_abi_definition_that_contradicts_the_header_does_not_compile(directory):
    write(directory / "count.cpp", SOURCE.replace("int64_t er_count", "int er_count"))
    with pytest.raises(NativeUnavailable, match=r"error: .*er_count"):
        build([directory / "count.cpp"])


@pytest.mark.parametrize(
    "text",
    [
        "long er_long(void);",
        "int er_missing_name(int);",
        "int er_unknown(const CMissing* rows);",
        "int er_array(int values[4]);",
        "int other_prefix(void);",
        "typedef struct { unsigned count; } CUnsigned;",
        "typedef struct { int64_t a, b; } CPair;",
        "typedef struct { int64_t bits : 3; } CBits;",
        "typedef struct { int64_t a; } CInner; typedef struct { const CInner* const* a; } COuter;",
        "typedef struct { struct { int64_t a; } inner; } COuter;",
        "struct CPlain { int64_t a; };",
        "enum { SHIFTED = 1 << 2 };",
        "enum Named { ONE };",
        "#define SIZE 4",
        "/* a comment */ int er_commented(void);",
        "int er_unfinished(void)",
    ],
)
def test_abi_unsupported_declaration_raises(text):
    with pytest.raises(ValueError, match="the kernels' header"):
        read(text)


def test_abi_unknown_names_raise():
    with pytest.raises(AttributeError):
        abi.CMissing  # noqa: B018
    with pytest.raises(AttributeError):
        abi.CEmbed(missing=1)
    with pytest.raises(AttributeError):
        abi.CEmbed().missing = 1
