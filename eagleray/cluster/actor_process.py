"""The Ray actor that a worker lives in. A complete small host: it says where it is, then runs what it is told to."""

from __future__ import annotations

import importlib
import os
import socket
import time
from importlib.metadata import version

import msgspec
import ray

from eagleray.log import get_logger, setup_logging

logger = get_logger(__name__)


class ActorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker is and what it was given, before it is anything."""

    node_id: str
    hostname: str
    pid: int
    accelerator_ids: list[str]
    """GPUs that Ray assigned, by the names they have in CUDA_VISIBLE_DEVICES."""
    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES."""
    niceness: int
    """Above 0: Ray lowered this process's priority, and we may not raise it."""
    versions: dict[str, str]


def own_versions() -> dict[str, str]:
    """What must be the same everywhere. Ray checks its own and Python's as the cluster is set up."""
    return {"eagleray": version("eagleray")}


class ActorProcess:
    """Not decorated: `spawn` makes it an actor. One method runs at a time, on the main thread of its process."""

    def __init__(self, label: str, log_level: str) -> None:
        self._label = label
        _take_back_omp_threads()
        _take_back_priority()
        setup_logging(label, log_level)
        _set_title(f"eagleray {label}")

    def __repr__(self) -> str:
        """What Ray prefixes this process's lines with."""
        return self._label

    def where(self, variables: dict[str, str]) -> ActorInfo:
        """Take these variables into the environment, and tell where it is. The first call: nothing that reads them has
        been imported. Arguments of the constructor would be kept in Ray's control store."""
        os.environ.update(variables)
        time.tzset()
        context = ray.get_runtime_context()
        return ActorInfo(
            node_id=context.get_node_id(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            accelerator_ids=[str(name) for name in context.get_accelerator_ids().get("GPU", [])],
            visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
            niceness=os.nice(0),
            versions=own_versions(),
        )

    def run(self, target: str, payload: bytes) -> None:
        """Be what `target`, `module:function`, makes of `payload`. Returns when that ends.

        The reference to its result is the sentinel: Ray makes it ready with an error when this process dies.
        """
        module, _, function = target.partition(":")
        try:
            getattr(importlib.import_module(module), function)(payload)
        except Exception:
            logger.exception("%s ended", self._label)
            raise


def _take_back_omp_threads() -> None:
    """Ray sets one OpenMP thread per CPU it assigned, or one: `num_threads` decides, unless the user has set it."""
    env_vars = ray.get_runtime_context().runtime_env.get("env_vars", {})
    if "OMP_NUM_THREADS" not in env_vars:
        os.environ.pop("OMP_NUM_THREADS", None)


def _take_back_priority() -> None:
    """Ray runs its workers at nice 15: beside any other work, a step would take many times as long.

    Where the system does not let us, `where` tells, and the engine warns. On Linux niceness belongs to threads, and
    Ray's have started already.
    """
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [0]
    for thread in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, 0)
        except OSError:  # not allowed, or that thread has ended
            continue


def _set_title(title: str) -> None:
    try:
        from setproctitle import setproctitle  # type: ignore[import-not-found]
    except ImportError:  # optional: Ray's own title stays
        return
    setproctitle(title)
