"""Calls of the worker extension by the engine: weights that a method may have loaded make older blocks unusable."""

from __future__ import annotations

import math

import pytest
from engine_fakes import CountingGroup

from eagleray.config.build import build_config
from eagleray.engine.core import EngineCore
from eagleray.engine.startup import start_engine
from eagleray.errors import DeadlineExceeded, InvalidRequest
from eagleray.executor.executor import Executor
from eagleray.identity import ClientId
from eagleray.messages.failure import Failure
from eagleray.messages.requests import CallWorkers, Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import ExtensionReturned

CLIENT = ClientId("i", 0)
BLOCK_SIZE = 4
CALL = CallWorkers(client=CLIENT, call_id=1, method="weigh", arguments=b"", timeout=5)


def num_cached(core: EngineCore, name: str) -> int:
    """Compute the same prompt once more, and return how many of its tokens were found in the cache."""
    stopping, sampling = Stopping(max_tokens=1), Sampling(seed=0)
    prompt = list(range(3 * BLOCK_SIZE + 1))
    request = Generate(request_id=name, client=CLIENT, prompt_token_ids=prompt, sampling=sampling, stopping=stopping)
    core.scheduler.add(request)
    chunks = []
    while core.scheduler.has_work:
        chunks += core.step(lambda _: None).by_client[CLIENT].chunks
    return chunks[0].num_cached_tokens


@pytest.fixture
def group():
    return CountingGroup()


@pytest.fixture
def core(group):
    core = start_engine(build_config(block_size=BLOCK_SIZE), Executor(group), deadline=math.inf).core
    assert [num_cached(core, name) for name in ("first", "second")] == [0, 3 * BLOCK_SIZE]
    return core


def test_call_workers_method_loads_no_weights_keeps_prefix_cache(core, group):
    refused = ExtensionReturned(failure=Failure.of(InvalidRequest("no such method")))
    for returned in (group.returned, refused):
        group.returned = returned
        core.call_workers(CALL)
        assert num_cached(core, "after") == 3 * BLOCK_SIZE


@pytest.mark.parametrize(
    "returned",
    [
        ExtensionReturned(value=b"", has_loaded_weights=True),
        ExtensionReturned(failure=Failure(kind="RuntimeError", message="after some weights")),
    ],
    ids=["loads", "raises"],
)
def test_call_workers_method_may_have_loaded_weights_older_blocks_are_not_found(core, group, returned):
    group.returned = returned
    core.call_workers(CALL)
    assert [num_cached(core, name) for name in ("third", "fourth")] == [0, 3 * BLOCK_SIZE]


def test_call_workers_method_still_runs_older_blocks_are_not_found(core, monkeypatch):
    def give_up(*_, **__):
        raise DeadlineExceeded("no reply from rank 0")

    with monkeypatch.context() as patch:
        patch.setattr(core.executor, "gather", give_up)
        assert core.call_workers(CALL).failure is not None
    assert num_cached(core, "third") == 0
