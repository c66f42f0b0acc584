"""Workers as processes: they start, reply, are noticed at once when they exit, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from forked_programs import fork_server_of_tests
from processes import children_of

from eagleray.config.build import build_config
from eagleray.config.resolve import executor_name
from eagleray.errors import CheckpointError, ConfigError, DeadlineExceeded, WorkerFailed, WorkerLost
from eagleray.executor.choose import open_executor
from eagleray.executor.executor import Executor
from eagleray.identity import EngineId
from eagleray.messages.sampling import Sampling
from eagleray.messages.steps import CallDone, LoadModel, LoadNullModel, ModelLoaded, NewRow, OpenGroup, StepPlan
from eagleray.messages.workers import GroupOpened
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

DEADLINE = 30.0


@contextmanager
def executor(workers: int, **options):
    config = build_config(
        executor="processes", tensor_parallel_size=workers, num_threads=1, **{"heartbeat_timeout": 60, **options}
    )
    runtime_dir = make_runtime_dir()
    try:
        engine, server = EngineId("test", 0), fork_server_of_tests()
        opened = open_executor(engine, config, runtime_dir=runtime_dir, fork_server=server)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        remove_runtime_dir(runtime_dir)


def children() -> list[int]:
    """Return the live processes that this one has started."""
    return children_of(os.getpid())


def load_null(opened: Executor) -> None:
    opened.call(LoadNullModel(), CallDone, timeout=DEADLINE)


def first_plan(rows: int = 2) -> StepPlan:
    starts = [
        NewRow(
            row=row,
            request_id=str(row),
            token_ids=[1, 2, 3],
            num_prompt_tokens=3,
            num_computed_tokens=0,
            block_ids=[row],
            sampling=Sampling(seed=0),
        )
        for row in range(rows)
    ]
    return StepPlan(
        step=0, freed_rows=[], new_rows=starts, new_blocks=[], rows=list(range(rows)), num_tokens=[3] * rows
    )


def next_plan(step: int, rows: int = 2) -> StepPlan:
    return StepPlan(step=step, freed_rows=[], new_rows=[], new_blocks=[], rows=list(range(rows)), num_tokens=[1] * rows)


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.grid), 3])
def test_process_group_calls_are_answered_by_all_steps_by_sampler_and_failures_are_named(workers):
    before = children()
    with executor(workers) as opened:
        assert opened.world_size == workers
        load_null(opened)
        pending = [opened.step(first_plan()), opened.step(next_plan(1)), opened.step(next_plan(2))]
        assert [step.result().rows for step in pending] == [[0, 1]] * 3
        assert len(children()) == len(before) + workers
        pending = [opened.step(next_plan(3, rows=3))]  # the last of these rows never started
        with pytest.raises(WorkerFailed, match=r"engine-0/tp[012]-pp0: KeyError: 2\nTraceback(.|\n)*worker.py"):
            pending[0].result()
    assert children() == before


def test_process_group_user_error_keeps_its_type(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with executor(1, model=str(tmp_path)) as opened:
        opened.call(OpenGroup("engine"), GroupOpened, timeout=DEADLINE)
        with pytest.raises((CheckpointError, WorkerFailed)):
            opened.call(LoadModel(), ModelLoaded, timeout=DEADLINE)


def the_workers(before: list[int]) -> list[int]:
    return [pid for pid in children() if pid not in before]


def test_process_group_killed_worker_is_noticed_at_once():
    before = children()
    with executor(2) as opened:
        load_null(opened)
        os.kill(the_workers(before)[1], signal.SIGKILL)
        pending = opened.step(first_plan())
        with pytest.raises(WorkerLost, match=r"worker engine-0/tp[01]-pp0: it was killed by SIGKILL"):
            while True:
                pending.result()
                pending = opened.step(next_plan(1))
    assert children() == before


def test_process_group_killed_idle_worker_is_noticed():
    before = children()
    with executor(2) as opened:
        os.kill(the_workers(before)[0], signal.SIGKILL)
        deadline = time.monotonic() + DEADLINE
        with pytest.raises(WorkerLost, match="SIGKILL"):
            while time.monotonic() < deadline:
                opened.check()
                time.sleep(0.01)


def test_process_group_stopped_worker_is_noticed_by_heartbeat():
    before = children()
    with executor(2, heartbeat_timeout=1.5) as opened:
        load_null(opened)
        stopped = the_workers(before)[0]
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(WorkerLost, match="was silent for"):
            opened.call(LoadNullModel(), CallDone, timeout=DEADLINE)
    assert children() == before, "a stopped worker is ended too"


def test_process_group_worker_that_never_attaches_is_named(monkeypatch):
    before = children()
    monkeypatch.setenv("PYTHONSTARTUP", "")
    with pytest.raises((WorkerLost, DeadlineExceeded)), executor(1, startup_timeout=0.01):
        pass
    assert children() == before


def test_workers_exit_when_their_engine_is_killed(tmp_path):
    program = (
        "import time; from pathlib import Path; from eagleray.config.build import build_config\n"
        "from eagleray.executor.choose import open_executor; from eagleray.identity import EngineId\n"
        "config = build_config(executor='processes', tensor_parallel_size=2, num_threads=1)\n"
        f"opened = open_executor(EngineId('test', 0), config, runtime_dir=Path({str(tmp_path)!r}))\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None and engine.stdout.readline() == "ready\n"
        workers = [int(pid) for pid in Path(f"/proc/{engine.pid}/task/{engine.pid}/children").read_text().split()]
        assert len(workers) == 2
        engine.kill()
    deadline = time.monotonic() + DEADLINE
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker outlives its engine"
        time.sleep(0.01)


def test_executor_name_options_give_executor():
    assert executor_name(build_config(), in_placement_group=False) == "in-process"
    assert executor_name(build_config(), in_placement_group=True) == "ray"
    assert executor_name(build_config(tensor_parallel_size=2), in_placement_group=False) == "processes"
    assert executor_name(build_config(placement_group="ab"), in_placement_group=False) == "ray"
    assert executor_name(build_config(ray_address="auto"), in_placement_group=False) == "ray"
    assert executor_name(build_config(executor="processes"), in_placement_group=True) == "processes"
    with pytest.raises(ConfigError, match="needs 2"):
        build_config(executor="in-process", pipeline_parallel_size=2)
