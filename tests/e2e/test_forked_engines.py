"""An instance whose engine and workers are killed: the next ones are forks, and the answers are the same."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import children_of

from eagleray import LLM, SamplingParams
from eagleray.process import fork_server_keeper

DEADLINE = 60.0


def label_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")[-1].decode()


def labels_of(pids: list[int]) -> dict[str, int]:
    return {label_of(pid): pid for pid in pids}


def wait_for(found):
    deadline = time.monotonic() + DEADLINE
    while not (result := found()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return result


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux")
def test_engine_and_workers_that_are_forks_answer_like_those_started_fresh(monkeypatch, caplog):
    monkeypatch.setattr(fork_server_keeper, "PREPARE_DELAY_SECONDS", 0.0)
    before = children_of(os.getpid())

    def own() -> dict[str, int]:
        return labels_of([pid for pid in children_of(os.getpid()) if pid not in before])

    params = [
        SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True),
        SamplingParams(max_tokens=200, temperature=1.0, seed=7, ignore_eos=True),
    ]
    with LLM(
        num_threads=1,
        max_model_len=512,
        tensor_parallel_size=2,
        dtype="float32",
        device="cpu",
        worker_multiprocessing_method="forkserver",
    ) as llm:
        keeper = llm._instance.supervisor._fork_server
        expected = [answer.outputs[0].token_ids for answer in llm.generate(["hello"] * 2, params)]
        assert keeper.wait_until_ready(DEADLINE)
        answers = []
        thread = threading.Thread(target=lambda: answers.extend(llm.generate(["hello"] * 2, params)))
        thread.start()
        os.kill(own()["engine-0"], signal.SIGKILL)
        engine = wait_for(lambda: own().get("engine-0.1"))
        thread.join(DEADLINE)
        assert [answer.outputs[0].token_ids for answer in answers] == expected
        assert is_fork_of(engine, keeper.process_id)
        workers = labels_of(children_of(engine))
        assert workers.keys() == {"engine-0.1/tp0-pp0", "engine-0.1/tp1-pp0"}  # its own fork server has gone
        assert all(is_fork_of(worker, keeper.process_id) for worker in workers.values())
    assert own() == {}


def is_fork_of(pid: int, server: int) -> bool:
    """Whether the command line is in the memory of that of the server."""
    return bounds_of(pid) == bounds_of(server)


def bounds_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[45:47]
