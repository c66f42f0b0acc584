"""The worker extension, from a user's class to the results of its methods, in `LLM` and over HTTP."""

from __future__ import annotations

import base64
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from checkpoints import make_checkpoint
from serving import serve

from eagleray import LLM, SamplingParams
from eagleray.errors import ConfigError, DeadlineExceeded, EngineFailed, InvalidRequest, RequestFailed

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
OPTIONS = {"max_model_len": 200, "num_threads": 1, "log_level": "warning"}

MODULE = """
import os

class Probe:
    def __init__(self, worker):
        self.worker = worker
        self.total = None

    def describe(self):
        worker = self.worker
        return {
            "rank": worker.rank,
            "place": (worker.mesh.pp_rank, worker.mesh.tp_rank),
            "device": str(worker.device),
            "layers": worker.model.spec.num_layers,
            "pid": os.getpid(),
        }

    def add(self, array, scale=1):
        self.total = array * scale if self.total is None else self.total + array * scale
        return self.total

    def fail_on(self, rank):
        if self.worker.rank == rank:
            raise LookupError("no such expert")

    def model_itself(self):
        return [self.worker.model]

    def hold(self, started, released):
        with open(started, "w") as pipe:
            pipe.write(str(os.getpid()))
        with open(released) as pipe:
            pipe.read()
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Directory of the user's module, which this process and all of its children can import."""
    directory = tmp_path_factory.mktemp("extension")
    (directory / "users_probe.py").write_text(MODULE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(directory)])
        yield directory


def open_llm(checkpoint, **options):
    return LLM(str(checkpoint), worker_extension_cls="users_probe:Probe", **OPTIONS, **options)


@pytest.fixture(scope="module")
def llm(checkpoint, directory):
    with open_llm(checkpoint) as llm:
        yield llm


@pytest.fixture
def pipes(tmp_path):
    """Two named pipes: opening one waits until its other end is opened."""
    paths = [tmp_path / "started", tmp_path / "released"]
    for path in paths:
        os.mkfifo(path)
    return paths


def test_extension_methods_see_their_worker(llm):
    (found,) = llm.collective_rpc("describe")
    assert found.pop("pid") != os.getpid()
    assert found == {"rank": 0, "place": [0, 0], "device": "cpu", "layers": 3}


def test_extension_arrays_are_kept_and_returned(llm):
    array = np.arange(600_000, dtype=np.float32).reshape(2, -1)
    (first,) = llm.collective_rpc("add", args=(array,))
    assert (first.dtype, first.shape) == (array.dtype, array.shape)
    first += 1
    (second,) = llm.collective_rpc("add", 60, [array], {"scale": 2})
    assert np.array_equal(second, array * 3)


def test_extension_wrong_calls_and_exceptions_leave_the_engine_running(llm):
    (before,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    with pytest.raises(RequestFailed, match="`fail_on` raised on rank 0: LookupError: no such expert"):
        llm.collective_rpc("fail_on", args=[0])
    with pytest.raises(RequestFailed, match=r"rank 0: TypeError: the result of `model_itself`\[0\]: a value of type"):
        llm.collective_rpc("model_itself")
    with pytest.raises(RequestFailed, match=r"rank 0: TypeError: Probe\.describe"):
        llm.collective_rpc("describe", args=["too many"])
    for method in ("missing", "__init__", "worker"):
        with pytest.raises(InvalidRequest, match=f"`users_probe:Probe` has no public method `{method}`: it has `add`"):
            llm.collective_rpc(method)
    with pytest.raises(InvalidRequest, match=r"args\[0\]: a value of type builtins.set"):
        llm.collective_rpc("add", args=[{1}])
    (after,) = llm.generate("Hello", GREEDY, use_tqdm=False)
    assert after.outputs[0].token_ids == before.outputs[0].token_ids


def test_extension_calls_during_requests_succeed(llm):
    with ThreadPoolExecutor(5) as pool:
        texts = [pool.submit(llm.generate, "Hello", GREEDY, use_tqdm=False) for _ in range(2)]
        calls = [pool.submit(llm.collective_rpc, "describe") for _ in range(3)]
        assert {future.result(60)[0]["rank"] for future in calls} == {0}
        assert {len(future.result(60)[0].outputs[0].token_ids) for future in texts} == {5}


def test_extension_call_that_times_out_ends_for_its_caller_alone(llm, pipes):
    started, released = pipes
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.collective_rpc, "hold", 0.5, [str(started), str(released)])
        assert started.read_text()
        with pytest.raises(DeadlineExceeded, match="`hold` on the workers"):
            call.result(60)
    released.write_text("")
    assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert llm.collective_rpc("describe")[0]["rank"] == 0


def test_extension_call_whose_worker_is_killed_fails_with_the_cause(checkpoint, directory, pipes):
    started, released = pipes
    with open_llm(checkpoint) as llm, ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.collective_rpc, "hold", args=[str(started), str(released)])
        os.kill(int(started.read_text()), signal.SIGKILL)
        with pytest.raises(EngineFailed, match="SIGKILL"):
            call.result(60)
        assert llm.collective_rpc("describe")[0]["rank"] == 0  # of the engine that has taken its place


def test_extension_results_are_in_order_of_rank(checkpoint, directory):
    with open_llm(checkpoint, tensor_parallel_size=2) as llm:
        found = llm.collective_rpc("describe")
        assert [(one["rank"], one["place"]) for one in found] == [(0, [0, 0]), (1, [0, 1])]
        assert found[0]["pid"] != found[1]["pid"]
        with pytest.raises(RequestFailed, match="raised on rank 1: LookupError: no such expert"):
            llm.collective_rpc("fail_on", args=[1])
        assert llm.collective_rpc("fail_on", args=[2]) == [None, None]
        assert len(llm.generate("Hello", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 5


def test_missing_extension_is_refused_at_the_start(checkpoint, directory):
    with pytest.raises(ConfigError, match="module `users_probe` has no `Prober`"):
        LLM(str(checkpoint), worker_extension_cls="users_probe:Prober", **OPTIONS)


def test_extension_call_over_http_returns_results(checkpoint, directory: Path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(directory))
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    encoded = {"data": base64.b64encode(array.tobytes()).decode(), "shape": [2, 3], "dtype": "<f4"}
    arguments = ("--worker-extension-cls", "users_probe:Probe", "--enable-collective-rpc")
    with serve(str(checkpoint), "--max-model-len", "200", *arguments) as server:
        url = server.url.removesuffix("/v1") + "/collective_rpc"
        response = httpx.post(url, json={"method": "add", "args": [encoded]}, timeout=60)
        assert (response.status_code, response.json()) == (200, {"results": [encoded]})
        response = httpx.post(url, json={"method": "fail_on", "kwargs": {"rank": 0}}, timeout=60)
        assert response.status_code == 500
        assert "raised on rank 0: LookupError: no such expert" in response.json()["error"]["message"]
        response = httpx.post(url, json={"method": "missing"}, timeout=60)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "method")
    assert server.process.returncode == 0, server.log
