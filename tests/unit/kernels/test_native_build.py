"""A library is compiled once, found again, made again when its sources change, and refused with a reason."""

from __future__ import annotations

import ctypes
import fcntl
import logging
import os
import platform
import shutil
import stat
import tempfile
import time
from pathlib import Path

import pytest
import torch

from eagleray.config.environment import build_settings
from eagleray.kernels.cpu.abi import CInterface
from eagleray.kernels.cpu.build import cache as build_cache
from eagleray.kernels.cpu.build import library as native
from eagleray.kernels.cpu.build.compiler import Compiler, compile_library, find_compiler
from eagleray.kernels.cpu.build.library import build, load, native_library
from eagleray.kernels.cpu.build.openmp import NativeUnavailable, mapped_runtimes, openmp_functions
from eagleray.kernels.cpu.build.variants import NATIVE_FLAGS, variants_of

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

USE_OPENMP = "void er_use_openmp(void* parallel, void* set_dynamic, void* get_num_threads)"
EXPORT = 'extern "C" __attribute__((visibility("default")))'


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """The user's cache directory; no compiler is chosen."""
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
    """Names of the files in `directory`, except locks."""
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_build_several_sources_makes_one_library_and_logs_once(source, tmp_path, cache, capfd, caplog):
    write(tmp_path / "ten.h", "constexpr int TEN = 10;")
    other = write(tmp_path / "other.cpp", f'#include "ten.h"\n{EXPORT} int other() {{ return TEN; }}')
    with caplog.at_level(logging.INFO, "eagleray"):
        path = build([source, other])
    library = load(path)
    assert (library.answer(), library.other()) == (42, 10)
    assert libraries(cache) == [path.name]
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]
    assert caplog.text.count("compiling kernels, once") == 1
    assert capfd.readouterr() == ("", "")


def test_build_same_sources_are_found_again(source, runs, tmp_path):
    path = build([source])
    assert build([source]) == path
    assert num_runs(runs) == 1
    assert build([source], directory=tmp_path / "elsewhere").parent == tmp_path / "elsewhere"
    assert num_runs(runs) == 2


@pytest.mark.parametrize("name", ["answer.cpp", "header.h"])
def test_build_changed_file_is_compiled_again(source, runs, tmp_path, name):
    write(tmp_path / "header.h", "")
    first = build([source])
    with (tmp_path / name).open("a") as file:
        file.write("\n// another line")
    assert build([source]) != first
    assert num_runs(runs) == 2


def test_build_each_processor_has_its_own_library(source):
    flags = {variant.flags for variant in variants_of(platform.machine())} | {NATIVE_FLAGS}
    assert len({build([source], target=target) for target in flags}) == len(flags)


@pytest.mark.parametrize("damage", ["truncated", "emptied", "changed"])
def test_build_damaged_library_is_made_again(source, runs, damage):
    path = build([source])
    whole = path.read_bytes()
    half = len(whole) // 2
    path.write_bytes(
        {"truncated": whole[:half], "emptied": b"", "changed": whole[:half] + b"?" + whole[half + 1 :]}[damage]
    )
    assert build([source]) == path
    assert num_runs(runs) == 2
    assert load(path).answer() == 42


def test_build_unfinished_leftovers_are_removed(source, cache):
    path = build([source])
    path.unlink()
    remains = cache / f"making-{path.name}-somebody"
    remains.mkdir()
    write(remains / "linked.so", "half")
    build([source])
    assert libraries(cache) == [path.name]


# ---- the compiler


def test_build_without_compiler_says_what_to_install(source, tmp_path, cache, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler on PATH .*c\+\+, g\+\+.*: install GCC"):
        build([source])
    assert not cache.exists()


def test_build_missing_chosen_compiler_is_named(source, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(NativeUnavailable, match="no-such-compiler, which CXX names"):
        build([source])


def test_build_chosen_compiler_may_have_arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "g++ -DANSWER=7")
    source = write(tmp_path / "chosen.cpp", f"{EXPORT} int answer() {{ return ANSWER; }}")
    assert load(build([source])).answer() == 7


def test_build_error_is_reported_and_leaves_nothing(source, tmp_path, cache):
    broken = write(tmp_path / "broken.cpp", "int f() { return nothing; }\nint g() { return nothing; }")
    with pytest.raises(NativeUnavailable, match=r"failed with `broken.cpp:1:\d+: error: .*nothing.*`: install GCC"):
        build([source, broken])
    assert libraries(cache) == []


def test_build_undefined_symbol_is_reported(tmp_path, cache):
    source = write(tmp_path / "half.cpp", f"int other(); {EXPORT} int half() {{ return other(); }}")
    with pytest.raises(NativeUnavailable, match="undefined reference to `other"):
        build([source])
    assert libraries(cache) == []


def test_build_crashing_compiler_is_reported(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", str(script(tmp_path / "crashing-c++", "kill -SEGV $$")))
    with pytest.raises(NativeUnavailable, match=r"crashing-c\+\+ failed with `exit status -11`"):
        build([source])


@pytest.fixture
def slow_compiler(tmp_path) -> tuple[Compiler, Path]:
    """A compiler that ends at once, except for slow.cpp, for which it starts a program that does not end; and a file
    with the process id of that program."""
    started = tmp_path / "started"
    text = f"""case "$*" in
    *slow.cpp*) sleep 1000 & echo $! > {started}.new; mv {started}.new {started}; wait;;
    *) while [ ! -e {started} ]; do sleep 0.01; done;;
    esac"""
    return Compiler((str(script(tmp_path / "slow-c++", text)),), (), ""), started


def runs_on(pid_file: Path) -> bool:
    """Whether a process was started and runs; one that has exited may wait for its new parent to reap it."""
    if not pid_file.exists():
        return False
    stat_file = Path(f"/proc/{pid_file.read_text().strip()}/stat")
    try:
        return stat_file.read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def is_gone(pid_file: Path) -> bool:
    deadline = time.monotonic() + 60
    while runs_on(pid_file) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not runs_on(pid_file)


def test_compile_library_interrupted_kills_what_compilers_have_started(slow_compiler, tmp_path, monkeypatch):
    compiler, started = slow_compiler
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})

    def interrupt():
        raise SystemExit(143)

    with pytest.raises(SystemExit):
        compile_library(compiler, ["fast.cpp", "slow.cpp", "later.cpp"], directory=tmp_path, on_compiled=interrupt)
    assert is_gone(started)


def test_compile_library_beyond_the_time_limit_is_killed(slow_compiler, tmp_path, monkeypatch):
    compiler, started = slow_compiler
    monkeypatch.setattr("eagleray.kernels.cpu.build.compiler.COMMAND_SECONDS", 1.0)
    with pytest.raises(NativeUnavailable, match=r"took longer than 1 s: .*slow\.cpp"):
        compile_library(compiler, ["slow.cpp"], directory=tmp_path)
    assert is_gone(started)


def test_find_compiler_clang_is_passed_over(tmp_path, monkeypatch):
    script(tmp_path / "c++", "echo '#define __clang__ 1'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert find_compiler(None).command == ("g++",)
    with pytest.raises(NativeUnavailable, match=r"c\+\+ is clang, and the kernels are written for GCC: install GCC"):
        find_compiler("c++")


# ---- the cache


def test_build_unwritable_cache_uses_a_private_directory(source, runs, tmp_path, monkeypatch):
    write(tmp_path / "file", "")
    monkeypatch.setenv("EAGLERAY_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = build([source])
    assert path.parent == tmp_path / f"eagleray-cache-{os.getuid()}"
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert build([source]) == path
    assert num_runs(runs) == 1


@pytest.mark.parametrize("kind", ["open to all", "a link"])
def test_build_private_directory_writable_by_others_is_refused(source, tmp_path, monkeypatch, kind):
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


def test_build_lock_held_too_long_raises(source, runs, monkeypatch):
    path = build([source])
    path.unlink()
    monkeypatch.setattr(build_cache, "LOCK_SECONDS", 0.1)
    with path.with_name(f"{path.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NativeUnavailable, match=r"another process has held .*\.lock for more than"):
            build([source])
    assert num_runs(runs) == 1


def test_build_settings_cache_directory_follows_the_environment(monkeypatch):
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


def test_openmp_functions_are_those_of_torch(tmp_path):
    text = f"""{EXPORT} int count(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int (*num_threads)()) {{
      struct Team {{ int (*num_threads)(); int total; }} team{{num_threads, 0}};
      auto work = [](void* data) {{
        auto& team = *static_cast<Team*>(data);
        __atomic_fetch_add(&team.total, team.num_threads(), __ATOMIC_RELAXED);
      }};
      parallel(work, &team, 2, 0);
      return team.total;
    }}"""
    torch.ones(1000).sum()
    before = mapped_runtimes()
    library = load(build([write(tmp_path / "team.cpp", text)]))
    parallel, _, num_threads = map(ctypes.c_void_p, openmp_functions())
    assert library.count(parallel, num_threads) == 2 * 2
    assert len(before) == 1
    assert mapped_runtimes() == before


def test_openmp_functions_of_a_private_runtime_are_found_by_its_file(monkeypatch):
    expected, open_library = openmp_functions(), ctypes.CDLL
    monkeypatch.setattr(ctypes, "CDLL", lambda name, **mode: open_library(name, **mode) if name else object())
    assert openmp_functions() == expected


# ---- the library


def test_native_library_second_call_returns_the_same(source, runs, monkeypatch):
    header = write(
        source.with_name("abi.h"), f"int er_answer(void);\nconst char* er_abi_fingerprint(void);\n{USE_OPENMP};"
    )
    with source.open("a") as file:
        file.write(f"\n{EXPORT} const char* er_abi_fingerprint() {{ return ABI_FINGERPRINT; }}")
        file.write(f"\n{EXPORT} {USE_OPENMP} {{}}")
        file.write(f"\n{EXPORT} int er_answer() {{ return answer(); }}")
    monkeypatch.setattr(native, "SOURCE_DIRECTORY", source.parent)
    monkeypatch.setattr(native, "abi", CInterface(header.read_bytes()))
    native_library.cache_clear()
    try:
        assert native_library() is native_library()
        assert native_library().answer() == 42
        assert num_runs(runs) == 1
    finally:
        native_library.cache_clear()


def test_build_without_sources_raises(tmp_path, monkeypatch):
    with pytest.raises(NativeUnavailable, match="no sources of kernels"):
        build([])


def test_load_file_that_is_no_library_is_refused(tmp_path):
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        load(write(tmp_path / "text.so", "text"))
