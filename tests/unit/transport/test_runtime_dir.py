"""Runtime directories last as long as their owners, and other processes remove them afterwards."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagleray.errors import ConfigError
from eagleray.transport.inbox import Inbox
from eagleray.transport.runtime_dir import check_room, make_runtime_dir, remove_dead_sockets, remove_runtime_dir


@pytest.fixture(autouse=True)
def parent(tmp_path_factory, monkeypatch):
    """Return the parent of this test's directories."""
    path = tmp_path_factory.mktemp("d")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setenv("TMPDIR", str(path))
    if len(str(path)) > 48:  # then /tmp is taken, which others use
        monkeypatch.setattr("eagleray.transport.runtime_dir.MAX_DIR_LENGTH", 200)
    return path


def age(path: Path, seconds: float = 3600.0) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def program(text: str) -> subprocess.Popen[str]:
    """Start a process that makes a directory, prints it, and runs `text`."""
    code = f"from eagleray.transport.runtime_dir import make_runtime_dir\nprint(make_runtime_dir(), flush=True)\n{text}"
    return subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_make_runtime_dir_mode_is_private():
    path = make_runtime_dir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    (path / "socket").touch()
    remove_runtime_dir(path)
    assert not path.exists()
    remove_runtime_dir(path)


def test_make_runtime_dir_full_disk_error_names_directory(monkeypatch, parent):
    def fail(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.mkdtemp", fail)
    with pytest.raises(ConfigError, match=rf"'{parent}': No space left on device; .* TMPDIR to another directory"):
        make_runtime_dir()


def test_make_runtime_dir_no_temporary_directory_is_one_sentence(monkeypatch):
    monkeypatch.setenv("TMPDIR", "/proc")
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc"])
    with pytest.raises(ConfigError, match=r"there is no directory for temporary files: No usable .*'/proc'.* TMPDIR"):
        make_runtime_dir()


def test_check_room_names_directory_and_limit(monkeypatch, parent):
    check_room(parent, 4096)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(ConfigError, match=rf"'{parent}': .*`ulimit -f` says 1000 bytes"):
            check_room(parent, 4096)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def fail(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", fail)
    with pytest.raises(ConfigError, match=rf"'{parent}': No space left on device"):
        check_room(parent, 4096)
    assert list(parent.iterdir()) == []


def test_socket_without_room_names_the_directory(parent):
    with pytest.raises(ConfigError, match=rf"cannot write to the directory '{parent}/gone'"):
        Inbox(parent / "gone", "name", bytes)


def test_make_runtime_dir_keeps_directories_of_living_owners():
    with program("input()") as owner:
        path = Path(owner.stdout.readline().strip())
        mine = make_runtime_dir()
        age(path)
        age(mine)
        remove_runtime_dir(make_runtime_dir())
        assert path.is_dir()
        assert mine.is_dir()
        owner.communicate("\n")
    remove_runtime_dir(mine)


def test_make_runtime_dir_removes_directory_of_killed_owner(parent):
    with program("input()") as owner:
        path = Path(owner.stdout.readline().strip())
        (path / "socket").touch()
        owner.kill()
        owner.communicate()
    remove_runtime_dir(make_runtime_dir())
    assert path.is_dir(), "it is young: its owner might be about to lock it"
    age(path)
    remove_runtime_dir(make_runtime_dir())
    assert list(parent.iterdir()) == []


def test_runtime_dir_lock_is_not_inherited_by_programs(parent):
    text = "import subprocess\nprint(subprocess.Popen(['sleep', '60'], close_fds=False, stdout=-3).pid)"
    with program(text) as owner:
        path = Path(owner.stdout.readline().strip())
        child = int(owner.stdout.readline())
    try:
        age(path)
        remove_runtime_dir(make_runtime_dir())
        assert list(parent.iterdir()) == []
    finally:
        os.kill(child, signal.SIGKILL)


def test_make_runtime_dir_unlocked_directory_is_removed_if_empty(parent):
    """Versions that did not lock made such directories."""
    empty, young, used, other = (
        parent / name for name in ("eagleray-aaaaaaaa", "eagleray-young123", "eagleray-used1234", "eagleray-mine")
    )
    for path in (empty, young, used, other):
        path.mkdir()
    (used / "socket").touch()
    (parent / "eagleray-file1234.run").touch()
    (parent / "eagleray-link1234.run").symlink_to(used)
    for path in (empty, used, other, parent / "eagleray-file1234.run"):
        age(path)
    remove_runtime_dir(make_runtime_dir())
    left = {path.name for path in parent.iterdir()}
    assert left == {path.name for path in (young, used, other)} | {"eagleray-file1234.run", "eagleray-link1234.run"}
    assert (used / "socket").exists()


def test_make_runtime_dir_concurrent_starts_remove_leftovers_only(parent):
    for number in range(50):
        path = parent / f"eagleray-{number:08}.run"
        path.mkdir()
        (path / "socket").touch()
        age(path)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: make_runtime_dir(), range(24)))
    assert sorted(parent.iterdir()) == sorted(made)
    for path in made:
        remove_runtime_dir(path)
    assert list(parent.iterdir()) == []


def test_remove_dead_sockets_without_listener_removes_them(parent):
    living, dead, young = parent / "engine-0", parent / "client-0", parent / "client-1"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(living))
        listener.listen()
        for path in (dead, young):
            with socket.socket(socket.AF_UNIX) as killed:
                killed.bind(str(path))
        (parent / "metrics").mkdir()
        (parent / "file").touch()
        for path in (living, dead, parent / "file"):
            os.utime(path, (0, 0))
        remove_dead_sockets(parent)
    assert sorted(path.name for path in parent.iterdir()) == ["client-1", "engine-0", "file", "metrics"]
