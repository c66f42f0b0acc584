"""Ray actors as processes for workers and engines: each reports where it runs, then runs the function it is given."""

from __future__ import annotations

import importlib
import logging
import os
import socket
import time
from contextlib import ExitStack
from importlib.metadata import version
from operator import attrgetter
from typing import Any

import msgspec
import ray

from eagleray.cluster.cleanup import remove_with_process
from eagleray.errors import EagleRayError
from eagleray.log import LogSettings, get_logger, setup_process_logging
from eagleray.messages.lifecycle import EngineSpec
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

logger = get_logger(__name__)


class ActorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Location of an actor, and what Ray has given it."""

    node_id: str
    hostname: str
    pid: int
    accelerator_ids: list[str]
    """GPUs that Ray assigned, by their names in CUDA_VISIBLE_DEVICES."""
    visible_devices: str | None
    """Value of CUDA_VISIBLE_DEVICES."""
    niceness: int
    """Niceness of the process; above 0, Ray lowered its priority, and we may not raise it."""
    versions: dict[str, str]


def own_versions() -> dict[str, str]:
    """Return the versions that must be the same on every node. Ray checks its own and Python's when a node joins."""
    return {"eagleray": version("eagleray")}


def load_target(target: str) -> Any:
    """Import the function or class that `target`, `module:name`, names."""
    module, _, name = target.partition(":")
    return attrgetter(name)(importlib.import_module(module))


class ActorProcess:
    """A worker's actor. Not decorated: `spawn` makes it an actor.

    One method runs at a time, on the main thread of its process.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        undo_omp_threads()
        undo_low_priority()
        _set_title(f"eagleray {label}")

    def __repr__(self) -> str:
        """Return the prefix that Ray puts before this process's lines."""
        return self._label

    def get_info(self, variables: dict[str, str], log: LogSettings) -> ActorInfo:
        """Put these variables into the environment, set up the log, and return where this actor runs.

        The first call, before anything that reads the variables is imported. Arguments of the constructor would be kept
        in Ray's control store.
        """
        os.environ.update(variables)
        time.tzset()
        setup_process_logging(self._label, log)
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
        """Call `target`, `module:function`, with `payload`; returns when that returns.

        The reference to the result is the sentinel: Ray makes it ready with an error when this process dies.
        """
        try:
            load_target(target)(payload)
        except Exception as error:
            self._log_exit(error)
            raise

    def _log_exit(self, error: Exception) -> None:
        """Log the exception that ends this process. An error of eagleray's own says everything in its message, which
        the process that waits for the sentinel logs or raises."""
        level = logging.DEBUG if isinstance(error, EagleRayError) else logging.ERROR
        logger.log(level, "%s ended", self, exc_info=error)


class EngineActor(ActorProcess):
    """An engine's actor. `bind` and `serve` are called once each, in this order; both run on the main thread."""

    def bind(self, target: str, payload: bytes) -> str:
        """Bind the inbox of the engine that `payload`, an encoded `EngineSpec`, describes, and return its address.

        `target`, `module:name`, is called with the spec and returns the engine: its `address`, and `run(report_error)`,
        which returns when the engine has been stopped and raises what ended it otherwise. The directory for its sockets
        is on this host.
        """
        with ExitStack() as stack:
            directory = make_runtime_dir()
            stack.callback(remove_runtime_dir, directory)
            stack.callback(remove_with_process(directory))
            spec = msgspec.structs.replace(msgspec.msgpack.decode(payload, type=EngineSpec), runtime_dir=str(directory))
            self._engine = load_target(target)(spec)
            self._exit_stack = stack.pop_all()
        address: str = self._engine.address
        return address

    def serve(self) -> None:
        """Run the engine. The reference to the result is the sentinel, like that of `ActorProcess.run`."""
        with self._exit_stack:
            try:
                # The engine reports an error to the supervisor itself once it is attached; this result reports it too.
                self._engine.run(lambda error: None)
            except Exception as error:
                self._log_exit(error)
                raise


def undo_omp_threads() -> None:
    """Unset Ray's number of OpenMP threads, one per CPU it assigned or one: `num_threads` decides, unless the user has
    set it."""
    env_vars = ray.get_runtime_context().runtime_env.get("env_vars", {})
    if "OMP_NUM_THREADS" not in env_vars:
        os.environ.pop("OMP_NUM_THREADS", None)


def undo_low_priority() -> None:
    """Raise the priority again: Ray runs its workers at nice 15, and a step would take far longer beside other work.

    Where the system does not permit it, `get_info` reports it and the engine warns. On Linux niceness belongs to
    threads, and Ray's have started already.
    """
    try:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
    except OSError:
        threads = [0]
    for thread in threads:
        try:
            os.setpriority(os.PRIO_PROCESS, thread, 0)
        except OSError:  # not permitted, or that thread has exited
            continue


def _set_title(title: str) -> None:
    try:
        from setproctitle import setproctitle  # type: ignore[import-not-found]
    except ImportError:  # optional: Ray's own title stays
        return
    setproctitle(title)
