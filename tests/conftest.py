"""Settings and fixtures for every test."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from eagleray.config.environment import build_settings, limit_openmp_spinning

# Tests run side by side on the same cores: threads that spin while they wait for each other made a file of model tests
# take four times the processor time. No test module has imported torch yet.
limit_openmp_spinning()

# Tests do not time: a slow machine is no failure.
settings.register_profile("eagleray", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("eagleray")


KERNEL_VARIABLES = {"EAGLERAY_CACHE_DIR", "EAGLERAY_CPU_KERNELS"}
"""Variables of eagleray that count in tests too, which may run with the kernels of a variant."""
PROXY_VARIABLES = {"ALL_PROXY", "HTTP_PROXY", "HTTPS_PROXY"}


def pytest_configure(config):
    """Remove options from the environment, such as an API key, which every server of a test would demand, and proxies,
    because tests reach this machine alone. Have Triton's kernels interpreted, on tensors of the CPU, unless this run is
    for a GPU. Triton reads the variable when a module with kernels is imported."""
    for name in list(os.environ):
        is_option = name.startswith(("EAGLERAY_", "VLLM_")) and name not in KERNEL_VARIABLES
        if is_option or name.upper() in PROXY_VARIABLES:
            del os.environ[name]
    # A fork server of each instance would import torch beside its test; tests of fork servers ask for one.
    os.environ["EAGLERAY_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    if not can_keep_kernels():
        os.environ["EAGLERAY_CACHE_DIR"] = os.path.join(tempfile.gettempdir(), f"eagleray-cache-{os.getuid()}")
    if config.getoption("markexpr") != "gpu":
        os.environ["TRITON_INTERPRET"] = "1"


def can_keep_kernels() -> bool:
    """Whether the user has a directory for compiled kernels. They are kept below TMPDIR otherwise, which some tests
    replace: each would compile them again, and leave them there."""
    directory = build_settings().cache_directory
    if directory is None:
        return False
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Import test modules without garbage collection, and exclude their objects from it afterwards. A full collection
    visits more than a million objects otherwise: 0.4 s, ten times while modules are imported and then again and again
    during tests."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def forked_programs() -> Iterator[None]:
    """Have engines forked that this process starts; see `forked_programs`."""
    from forked_programs import fork_server_running  # here, because most runs of unit tests start no engine

    with fork_server_running():
        yield


class TakingTurns(LoadScopeScheduling):
    """Scheduling of tests that run side by side: end-to-end tests take turns, and so do those of `tests/process` and
    those of `tests/ray`, which use one cluster, because they share the memory and the cores of the machine. A file of
    unit tests goes to whichever worker has time. The scope with the most tests comes first: the end-to-end tests, which
    take one worker more than half of the time."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path.startswith("tests/unit/") else path.rpartition("/")[0]


def pytest_xdist_make_scheduler(config, log):
    """Have tests take turns. Those for a GPU start no processes: each goes to whichever worker has time, because most
    of their time is the compilation of kernels."""
    return None if config.getoption("markexpr") == "gpu" else TakingTurns(config, log)
