from __future__ import annotations

import json
import os
import queue
import resource
import signal
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import children_of

from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.messages.failure import Ended
from eagleray.messages.lifecycle import Bound
from eagleray.process import fork_server_keeper
from eagleray.process.fork_server import NoFork
from eagleray.process.fork_server_keeper import ForkServerKeeper
from eagleray.process.spawn import Child, explain_exit

DEADLINE = 20.0
TEST = ClientId("test", 0)


@pytest.fixture(scope="module")
def fork_server():
    """Yield a fork server that has not imported the targets."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        patch.setattr(fork_server_keeper, "PREPARE_DELAY_SECONDS", 0.0)
        keeper = ForkServerKeeper(["eagleray.process.parent"])
        with one_environment():
            keeper.prepare()
            assert keeper.wait_until_ready(DEADLINE)
    yield keeper
    keeper.close()


@contextmanager
def one_environment():
    """Remove the variable that pytest sets anew for each test: a fork server is of use in one environment alone."""
    name = "PYTEST_CURRENT_TEST"
    value = os.environ.pop(name)
    yield
    os.environ[name] = value


class Forks:
    """A fork server that fails a test where a child cannot be forked, instead of letting it be started fresh."""

    def __init__(self, server: ForkServerKeeper) -> None:
        self._server = server

    def fork(self, *args) -> int:
        try:
            with one_environment():
                return self._server.fork(*args)
        except NoFork as error:
            raise AssertionError(f"no fork: {error}") from error


@pytest.fixture(params=["spawn", "forkserver"])
def spawn(monkeypatch, request):
    """Return a function that spawns a child of `children.py`, in both ways, and returns a queue of its messages and its
    exit reason."""
    forks = Forks(request.getfixturevalue("fork_server")) if request.param == "forkserver" else None
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    children = []

    def spawn(function: str, payload: bytes = b"", pass_fds: Sequence[int] = ()) -> tuple[Child, queue.Queue]:
        said: queue.Queue = queue.Queue()
        child = Child(
            target=f"children:{function}",
            member=TEST,
            payload=payload,
            log=LogSettings(),
            runtime_dir="/nonexistent",
            on_message=said.put,
            on_exit=lambda cause: said.put(cause.message),
            pass_fds=pass_fds,
            fork_server=forks,
        )
        children.append(child)
        return child, said

    yield spawn
    for child in children:
        child.kill()
        assert child.wait(DEADLINE)


def test_child_gets_payload_and_reports(spawn):
    child, said = spawn("report", b"payload")
    assert said.get(timeout=DEADLINE) == Bound(TEST, "payload")
    assert said.get(timeout=DEADLINE) == "it ended with exit code 0"
    assert child.wait(DEADLINE)


def test_child_signals_of_the_group_while_it_starts_are_ignored(spawn, capfd):
    child, said = spawn("report", b"payload")
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        os.kill(child.pid, number)
    assert said.get(timeout=DEADLINE) == Bound(TEST, "payload")
    assert said.get(timeout=DEADLINE) == "it ended with exit code 0"
    assert capfd.readouterr().err == ""


def test_child_signals_of_the_group_are_ignored(spawn):
    _, said = spawn("signal_yourself")
    assert said.get(timeout=DEADLINE) == Bound(TEST, "alive")
    assert said.get(timeout=DEADLINE) == "it ended with exit code 0"


def test_child_exception_arrives_as_failure_with_cause(spawn):
    _, said = spawn("fail")
    failed = said.get(timeout=DEADLINE)
    assert isinstance(failed, Ended)
    assert (failed.cause.kind, failed.cause.message) == ("CheckpointError", "the file is broken")
    assert failed.cause.is_user_error
    assert not failed.cause.traceback, "the message says all"
    assert said.get(timeout=DEADLINE) == "it ended with exit code 1"


def test_child_exit_with_living_fork_is_noticed(spawn):
    child, said = spawn("leave_a_fork")
    assert "it was killed by SIGKILL" in said.get(timeout=DEADLINE)
    assert child.wait(DEADLINE)


def test_child_unexpected_exception_is_reported_once_with_traceback(spawn):
    _, said = spawn("crash")
    failed = said.get(timeout=DEADLINE)
    assert isinstance(failed, Ended)
    assert (failed.cause.kind, failed.cause.is_user_error) == ("ZeroDivisionError", False)
    assert "children.py" in failed.cause.traceback
    assert said.get(timeout=DEADLINE) == "it ended with exit code 1"


@pytest.mark.parametrize("spawn", ["spawn"], indirect=True)  # the directory is not that of the fork server
def test_child_imports_from_parents_paths(spawn, tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise RuntimeError('imported from the current directory')")
    monkeypatch.chdir(tmp_path)
    _, said = spawn("import_random")
    assert "random.py" in said.get(timeout=DEADLINE).address


def test_child_missing_target_is_reported(spawn):
    _, said = spawn("nothing_of_that_name")
    assert said.get(timeout=DEADLINE).cause.kind == "AttributeError"


def test_child_killed_exit_reason_names_signal(spawn):
    _, said = spawn("kill_yourself")
    assert said.get(timeout=DEADLINE).startswith("it was killed by SIGKILL")


def test_explain_exit_killed_in_a_ray_worker_names_ray(monkeypatch):
    monkeypatch.setenv("RAY_JOB_ID", "01000000")
    assert explain_exit(-signal.SIGKILL) == (
        "it was killed by SIGKILL (perhaps Ray stops its actor, or the machine ran out of memory)"
    )


def test_child_exit_with_living_program_is_noticed(spawn):
    _, said = spawn("leave_a_program")
    program = int(said.get(timeout=DEADLINE).address)
    try:
        assert said.get(timeout=DEADLINE).startswith("it was killed by SIGKILL")
    finally:
        os.kill(program, signal.SIGKILL)


@pytest.fixture
def many_open_files():
    """Open files until the next one gets a number that `select` cannot handle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    files = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("spawn", ["spawn"], indirect=True)  # the limit of files is not that of the fork server
def test_child_of_parent_with_many_files_watches_parent(spawn, many_open_files, capfd):
    child, said = spawn("wait")
    said.get(timeout=DEADLINE)
    child._socket.shutdown(1)  # what the child would see of the parent's end
    assert said.get(timeout=DEADLINE) == "it ended with exit code 143"
    assert "Traceback" not in capfd.readouterr().err


def test_child_inherits_descriptors_by_number_and_standard_streams(spawn, capfd):
    reads, writes = os.pipe()
    _, said = spawn("use_descriptors", str(writes).encode(), [writes])
    assert said.get(timeout=DEADLINE) == Bound(TEST, "/dev/null")
    assert said.get(timeout=DEADLINE) == "it ended with exit code 0"
    os.close(writes)
    assert os.read(reads, 100) == b"to the pipe"
    os.close(reads)
    assert capfd.readouterr() == ("to stdout\n", "to stderr\n")


def test_child_that_exits_ends_threads_runs_handlers_and_flushes_streams(spawn, capfd):
    reads, writes = os.pipe()
    _, said = spawn("exit_with_work_left", str(writes).encode(), [writes])
    assert said.get(timeout=DEADLINE) == "it ended with exit code 3"
    os.close(writes)
    assert os.read(reads, 100) == b"thread, handler"
    os.close(reads)
    assert capfd.readouterr() == ("stream", "")


def test_child_is_ours_and_shows_its_label(spawn):
    child, said = spawn("wait")
    assert said.get(timeout=DEADLINE) == Bound(TEST, str(child.pid))
    assert child.pid in children_of(os.getpid())
    words = Path(f"/proc/{child.pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
    assert words[-1] == TEST.label.encode()
    assert any(b"eagleray.process.child import main" in word for word in words)


def test_child_has_the_scheduling_and_signals_of_a_fresh_one(spawn):
    _, said = spawn("describe_yourself")
    state = json.loads(said.get(timeout=DEADLINE).address)
    assert state == {
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "blocked": [],
        "threads": ["MainThread", "parent-watch"],
        "modules": [],
    }


def test_child_terminate_exits(spawn):
    child, said = spawn("wait")
    said.get(timeout=DEADLINE)
    child.terminate()
    assert said.get(timeout=DEADLINE) == "it ended with exit code 143"


def test_child_of_killed_parent_exits_and_cleans_up(spawn, tmp_path):
    runtime_dir = tmp_path / "runtime"
    runtime_dir.mkdir()
    child, said = spawn("have_a_child", str(runtime_dir).encode())
    grandchild = int(said.get(timeout=DEADLINE).address)
    child.kill()
    deadline = time.monotonic() + DEADLINE
    while _is_running(grandchild):
        assert time.monotonic() < deadline, f"process {grandchild} has outlived its parent"
        time.sleep(0.05)
    assert not runtime_dir.exists()


def test_child_stopped_exits_when_parent_is_killed(spawn, tmp_path):
    child, said = spawn("have_a_child", str(tmp_path / "runtime").encode())
    grandchild = int(said.get(timeout=DEADLINE).address)
    os.kill(grandchild, signal.SIGSTOP)
    child.kill()
    deadline = time.monotonic() + DEADLINE
    while _is_running(grandchild):
        assert time.monotonic() < deadline, f"process {grandchild} has outlived its parent"
        time.sleep(0.05)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # a zombie that nobody has reaped yet has ended
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
