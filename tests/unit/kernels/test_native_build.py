"""Sources become a library once: found again, made again when it must be, refused with a reason."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest
import torch

from eagleray.config.environment import build_settings
from eagleray.kernels.cpu.abi import CInterface
from eagleray.kernels.cpu.build import cache as build_cache
from eagleray.kernels.cpu.build import library as native
from eagleray.kernels.cpu.build.compiler import find_compiler
from eagleray.kernels.cpu.build.library import build, load, native_library
from eagleray.kernels.cpu.build.openmp import OpenmpRuntime, mapped_runtimes, openmp_runtime
from eagleray.kernels.cpu.build.unavailable import NativeUnavailable

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

EXPORT = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache directory, and no compiler that he has chosen."""
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def source(tmp_path) -> Path:
    return write(tmp_path / "answer.cpp", f"{EXPORT} int answer() {{ return 42; }}")


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    """A file that gets a line for each source that is compiled."""
    log = write(tmp_path / "runs", "")
    compiler = script(tmp_path / "counting-c++", f'case "$*" in *" -c "*) echo "$*" >> {log};; esac\nexec g++ "$@"')
    monkeypatch.setenv("CXX", str(compiler))
    return log


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def script(path: Path, text: str) -> Path:
    write(path, f"#!/bin/sh\n{text}\n").chmod(0o755)
    return path


def num_runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def libraries(directory: Path) -> list[str]:
    """What lies there, but for locks."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_sources_become_one_library_with_one_line_in_the_log(source, tmp_path, cache, capfd, caplog):
    write(tmp_path / "ten.h", "constexpr int TEN = 10;")
    other = write(tmp_path / "other.cpp", f'#include "ten.h"\n{EXPORT} int other() {{ return TEN; }}')
    with caplog.at_level(logging.INFO, "eagleray"):
        path = build([source, other])
    library = load(path)
    assert (library.answer(), library.other()) == (42, 10)
    assert libraries(cache) == [path.name]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    assert caplog.text.count("compiling kernels for this processor, once: ") == 1
    assert capfd.readouterr() == ("", "")


def test_what_was_compiled_is_found_again(source, runs, tmp_path):
    path = build([source])
    assert build([source]) == path
    assert num_runs(runs) == 1
    assert build([source], directory=tmp_path / "elsewhere").parent == tmp_path / "elsewhere"
    assert num_runs(runs) == 2


@pytest.mark.parametrize("name", ["answer.cpp", "header.h"])
def test_a_change_is_compiled(source, runs, tmp_path, name):
    write(tmp_path / "header.h", "")
    first = build([source])
    with (tmp_path / name).open("a") as file:
        file.write("\n// another line")
    assert build([source]) != first
    assert num_runs(runs) == 2


def test_each_kind_of_processor_has_its_own(source):
    variants = {build([source], march=march) for march in ("native", "x86-64", "x86-64-v3")}
    assert len(variants) == 3


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed"])
def test_a_damaged_file_is_made_again(source, runs, damage):
    path = build([source])
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(
        {"truncated": whole[:half], "emptied": b"", "changed": whole[:half] + b"?" + whole[half + 1 :]}[damage]
    )
    assert build([source]) == path
    assert num_runs(runs) == 2
    assert load(path).answer() == 42


def test_what_somebody_left_unfinished_is_removed(source, cache):
    path = build([source])
    path.unlink()
    remains = cache / f"making-{path.name}-somebody"
    remains.mkdir()
    write(remains / "linked.so", "half")
    build([source])
    assert libraries(cache) == [path.name]


# ---- the compiler


def test_without_a_compiler_the_reason_says_what_to_install(source, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler on PATH .*c\+\+, g\+\+, clang\+\+.*: install GCC"):
        build([source])
    assert not cache.exists()


def test_a_chosen_compiler_that_is_missing_is_named(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(NativeUnavailable, match="no-such-compiler, which CXX names"):
        build([source])


def test_a_chosen_compiler_may_have_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DANSWER=7")
    source = write(tmp_path / "chosen.cpp", f"{EXPORT} int answer() {{ return ANSWER; }}")
    assert load(build([source])).answer() == 7


def test_the_first_error_is_told_and_nothing_left(source, tmp_path, cache):
    broken = write(tmp_path / "broken.cpp", "int f() { return nothing; }\nint g() { return nothing; }")
    with pytest.raises(NativeUnavailable, match=r"failed with `broken.cpp:1:\d+: error: .*nothing.*`: install GCC"):
        build([source, broken])
    assert libraries(cache) == []


def test_a_symbol_that_nobody_defines_is_told_at_build_time(tmp_path, cache):
    source = write(tmp_path / "half.cpp", f"int other(); {EXPORT} int half() {{ return other(); }}")
    with pytest.raises(NativeUnavailable, match="undefined reference to `other"):
        build([source])
    assert libraries(cache) == []


def test_a_compiler_that_crashes_is_told(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "crashing-c++", "kill -SEGV $$")))
    with pytest.raises(NativeUnavailable, match=r"crashing-c\+\+ failed with `exit status -11`"):
        build([source])


def test_clang_is_used_only_where_it_can_be(tmp_path, monkeypatch):
    real = shutil.which("g++")
    script(tmp_path / "c++", "echo '#define __clang__ 1'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_compiler(None, march="native", runtime=OpenmpRuntime(Path("gomp"), False)).command == ("g++",)
    assert find_compiler(None, march="native", runtime=OpenmpRuntime(Path("iomp5"), True)).command == ("c++",)
    with pytest.raises(NativeUnavailable, match=r"c\+\+ is clang, which cannot use torch's OpenMP runtime gomp"):
        find_compiler("c++", march="native", runtime=OpenmpRuntime(Path("gomp"), False))
    assert find_compiler(real, march="native", runtime=OpenmpRuntime(Path("gomp"), False)).command == (real,)


# ---- where it is kept


def test_a_cache_that_cannot_be_written_is_replaced_by_a_private_directory(source, runs, tmp_path, monkeypatch):
    write(tmp_path / "file", "")
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = build([source])
    assert path.parent == tmp_path / f"eagleray-cache-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert build([source]) == path
    assert num_runs(runs) == 1


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_a_temporary_directory_that_others_can_write_is_refused(source, tmp_path, monkeypatch, kind):
    write(tmp_path / "file", "")
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    taken = tmp_path / f"eagleray-cache-{os.getuid()}"
    if kind == "a link":
        (tmp_path / "theirs").mkdir()
        taken.symlink_to(tmp_path / "theirs")
    else:
        taken.mkdir()
        taken.chmod(0o777)
    with pytest.raises(NativeUnavailable, match=r"nowhere to keep .*others can write there.*: set EAGLERAY_CACHE_DIR"):
        build([source])


def test_a_wait_for_another_process_has_an_end(source, runs, monkeypatch):
    path = build([source])
    path.unlink()
    monkeypatch.setattr(build_cache, "LOCK_SECONDS", 0.1)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NativeUnavailable, match=r"another process has held .*\.lock for more than"):
            build([source])
    assert num_runs(runs) == 1


def test_the_environment_says_where_the_cache_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", "~/ours")
    assert build_settings().cache_directory == Path("/home/somebody/ours")
    monkeypatch.delenv("EAGLERAY_CACHE_DIR")
    assert build_settings().cache_directory == Path("/xdg/eagleray")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert build_settings().cache_directory == Path("/home/somebody/.cache/eagleray")
    monkeypatch.setenv("HOME", "relative")
    assert build_settings().cache_directory is None


# ---- threads


def test_a_team_is_made_of_torchs_threads(tmp_path):
    text = f"""#include <omp.h>
    {EXPORT} int count(int num_threads, int* seen) {{
      int size = 0;
    #pragma omp parallel num_threads(num_threads)
      {{
        seen[omp_get_thread_num()] = 1;
    #pragma omp single
        size = omp_get_num_threads();
      }}
      return size;
    }}"""
    torch.ones(1000).sum()
    before = mapped_runtimes()
    library = load(build([write(tmp_path / "team.cpp", text)]))
    seen = (ctypes.c_int * 2)()
    assert library.count(2, seen) == 2
    assert list(seen) == [1, 1]
    assert mapped_runtimes() == before == {openmp_runtime().path}


# ---- the library


def test_the_kernels_are_loaded_once(source, runs, monkeypatch):
    header = write(source.with_name("abi.h"), "int er_answer(void);\nconst char* er_abi_fingerprint(void);")
    with source.open("a") as file:
        file.write(f"\n{EXPORT} const char* er_abi_fingerprint() {{ return ABI_FINGERPRINT; }}")
        file.write(f"\n{EXPORT} int er_answer() {{ return answer(); }}")
    monkeypatch.setattr(native, "NATIVE", source.parent)
    monkeypatch.setattr(native, "abi", CInterface(header.read_bytes()))
    native_library.cache_clear()
    try:
        assert native_library() is native_library()
        assert native_library().answer() == 42
        assert num_runs(runs) == 1
    finally:
        native_library.cache_clear()


def test_an_installation_without_sources_is_told(tmp_path, monkeypatch):
    with pytest.raises(NativeUnavailable, match="no sources of kernels"):
        build([])


def test_a_file_that_is_no_library_is_refused(tmp_path):
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        load(write(tmp_path / "text.so", "text"))
