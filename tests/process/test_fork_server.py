"""A fork server that is lost, hangs, or was started in another environment; what its forks share."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import children_of

from eagleray.identity import ClientId
from eagleray.log import LogSettings
from eagleray.messages.lifecycle import Bound
from eagleray.process import fork_server_keeper
from eagleray.process.fork_server import NoFork
from eagleray.process.fork_server_keeper import ForkServerKeeper
from eagleray.process.spawn import Child
from eagleray.process.subreaper import adopting_orphans

DEADLINE = 20.0
TEST = ClientId("test", 0)


@pytest.fixture(autouse=True)
def targets(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(fork_server_keeper, "PREPARE_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(fork_server_keeper, "REPLACEMENT_DELAY_SECONDS", 0.01)


@pytest.fixture
def open_keeper():
    """Return a function that starts a fork server which imports modules, and waits until it is ready."""
    keepers = []

    def open_keeper(*modules: str) -> ForkServerKeeper:
        keeper = ForkServerKeeper(modules or ["eagleray.process.parent"])
        keepers.append(keeper)
        keeper.prepare()
        assert keeper.wait_until_ready(DEADLINE)
        return keeper

    yield open_keeper
    for keeper in keepers:
        keeper.close()


class Counted:
    """A fork server that counts the children it has forked, and notes why it has not forked others."""

    def __init__(self, keeper: ForkServerKeeper) -> None:
        self._keeper = keeper
        self.pids: list[int] = []
        self.reasons: list[str] = []

    def fork(self, *args) -> int:
        try:
            self.pids.append(self._keeper.fork(*args))
        except NoFork as error:
            self.reasons.append(str(error))
            raise
        return self.pids[-1]


def run_child(forks: Counted, function: str, payload: bytes = b"", *, has_children: bool = False) -> list:
    """Run a child of `children.py` to its end and return its messages and its exit reason."""
    said: queue.Queue = queue.Queue()
    child = start_child(forks, function, payload, said, has_children=has_children)
    assert child.wait(DEADLINE)
    return list(said.queue)


def start_child(
    forks: Counted, function: str, payload: bytes, said: queue.Queue, *, has_children: bool = False
) -> Child:
    return Child(
        target=f"children:{function}",
        member=TEST,
        payload=payload,
        log=LogSettings(),
        runtime_dir="",
        on_message=said.put,
        on_exit=lambda cause: said.put(cause.message),
        fork_server=forks,
        has_children=has_children,
    )


def wait_until(condition) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def assert_works(said: list) -> None:
    assert said == [Bound(TEST, "payload"), "it ended with exit code 0"]


def test_forks_do_not_share_random_state(open_keeper):
    forks = Counted(open_keeper("numpy.random", "random", "multiprocessing"))
    first, second = (json.loads(run_child(forks, "draw")[0].address) for _ in range(2))
    assert len(forks.pids) == 2
    assert all(one != other for one, other in zip(first, second, strict=True))


def test_fork_server_has_one_thread_after_libraries_started_some(open_keeper):
    keeper = open_keeper("numpy")  # OpenBLAS starts threads where there are several cores
    assert len(list(Path(f"/proc/{keeper.process_id}/task").iterdir())) == 1


def test_fork_server_killed_is_replaced_and_its_forks_go_on(open_keeper, caplog):
    keeper = open_keeper()
    forks, said = Counted(keeper), queue.Queue()
    child = start_child(forks, "wait", b"", said)
    said.get(timeout=DEADLINE)
    killed = keeper.process_id
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: not is_running(killed))
    assert_works(run_child(forks, "report", b"payload"))  # by whichever way
    wait_until(lambda: keeper.process_id not in (None, killed) and keeper.wait_until_ready(DEADLINE))
    num_forked = len(forks.pids)
    assert_works(run_child(forks, "report", b"payload"))
    assert len(forks.pids) == num_forked + 1
    assert is_running(child.pid)
    child.terminate()
    assert said.get(timeout=DEADLINE) == "it ended with exit code 143"
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.endswith("another one is started, and processes start fresh meanwhile")


def test_fork_server_stopped_is_given_up_and_replaced(open_keeper):
    keeper = open_keeper()
    forks, stopped = Counted(keeper), keeper.process_id
    os.kill(stopped, signal.SIGSTOP)
    assert_works(run_child(forks, "report", b"payload"))
    assert forks.reasons == ["no answer within 1 s"]
    wait_until(lambda: not is_running(stopped))
    wait_until(lambda: keeper.process_id not in (None, stopped))
    assert keeper.wait_until_ready(DEADLINE)
    assert_works(run_child(forks, "report", b"payload"))
    assert len(forks.pids) == 1


def test_fork_server_lost_again_and_again_is_given_up(open_keeper, monkeypatch):
    monkeypatch.setattr(fork_server_keeper, "MAX_REPLACEMENTS", 1)
    keeper = open_keeper()
    for _ in range(2):
        assert keeper.wait_until_ready(DEADLINE)
        killed = keeper.process_id
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda killed=killed: keeper.process_id != killed)
    wait_until(lambda: not keeper._thread.is_alive())
    forks = Counted(keeper)
    assert_works(run_child(forks, "report", b"payload"))
    assert forks.reasons == ["there is no fork server that is ready"]


def test_child_in_another_environment_is_started_fresh(open_keeper, monkeypatch):
    forks = Counted(open_keeper())
    monkeypatch.setenv("EAGLERAY_TEST_OF_FORKS", "1")
    assert_works(run_child(forks, "report", b"payload"))
    assert forks.reasons == ["the environment of this process has changed since it was started"]


def test_fork_server_whose_modules_cannot_be_imported_is_not_replaced(caplog):
    keeper = ForkServerKeeper(["eagleray.no_such_module"])
    keeper.prepare()
    wait_until(lambda: not keeper._thread.is_alive())
    assert "ModuleNotFoundError" in caplog.text
    assert_works(run_child(Counted(keeper), "report", b"payload"))


def test_fork_server_of_killed_owner_exits():
    program = (
        "import time; from eagleray.process import fork_server_keeper\n"
        "fork_server_keeper.PREPARE_DELAY_SECONDS = 0.0\n"
        "keeper = fork_server_keeper.ForkServerKeeper(['eagleray.process.parent']); keeper.prepare()\n"
        "assert keeper.wait_until_ready(20); print(keeper.process_id, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        server = int(owner.stdout.readline())
        os.kill(server, signal.SIGSTOP)  # the kernel continues it
        owner.kill()
        wait_until(lambda: not is_running(server))


def test_fork_server_closed_leaves_nothing(open_keeper):
    before = children_of(os.getpid())
    keeper = open_keeper()
    assert_works(run_child(Counted(keeper), "report", b"payload"))
    keeper.close()
    assert children_of(os.getpid()) == before


def test_fork_with_children_forks_them_too(open_keeper):
    forks = Counted(open_keeper())
    said = run_child(forks, "fork_children", has_children=True)
    report = json.loads(said[0].address)
    assert said[1] == "it ended with exit code 0"
    assert report == {"forked": 2, "exits": ["it ended with exit code 0"] * 2, "left": []}


def test_adopting_orphans_restores_the_setting():
    with adopting_orphans():
        pass
    sleeper = subprocess.run(
        ["sh", "-c", "sleep 60 >/dev/null & echo $!"], stdout=subprocess.PIPE, text=True, check=True
    )
    pid = int(sleeper.stdout)
    assert pid not in children_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
