"""Joining a Ray cluster, or starting one here."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import ray
from ray._private import services

from eagleray.cluster.environment import is_withheld
from eagleray.cluster.instances import check_alone
from eagleray.cluster.local_cluster import LocalCluster, OnLost
from eagleray.cluster.preflight import check_in, check_reachable
from eagleray.errors import ClusterError, ClusterLost
from eagleray.log import get_logger
from eagleray.messages.workers import RayContext

logger = get_logger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""Of a local cluster. Nothing large goes through it."""


@dataclass(frozen=True)
class Connection:
    """This process is a driver of the cluster."""

    address: str
    node_id: str
    """The node that this process is on."""
    is_own: bool
    """The cluster is a local one that this process has started."""
    _disconnect: Callable[[], object]

    def close(self) -> None:
        """Disconnect; a local cluster that we started ends."""
        self._disconnect()


def connect(
    ray_address: str | None,
    *,
    namespace: str,
    program: RayContext | None = None,
    keep: Sequence[str] = (),
    on_lost: OnLost | None = None,
) -> Connection:
    """Become a driver of a Ray cluster.

    `ray_address`: host:port; `auto` for one that runs here (or `RAY_ADDRESS`); `local` for a new one on this host; None
    for what `auto` finds, else a new one. A process that is a driver already stays what it is, and `close` leaves
    it so. In the cluster of `program`, this process's job has that program's runtime_env, which Ray hands down to the
    actors; the packages that it names are kept for as long as one of the two jobs lives. A cluster that is started here
    inherits the environment, but of what may be secrets only the variables that `keep` (patterns) names. When it dies
    this process ends; `on_lost` is called with the cause before. Raises `ClusterError`.
    """
    if ray.is_initialized():
        return _stay(ray_address)
    address = _resolve(ray_address)
    if address is None:
        return _start_local(namespace, keep, on_lost or _log_loss)
    check_in(address)
    _init(address=address, namespace=namespace, **_inherited(program, address))
    try:
        check_alone(namespace)
    except BaseException:
        ray.shutdown()
        raise
    return _connection(ray.shutdown, is_own=False)


def _start_local(namespace: str, keep: Sequence[str], on_lost: OnLost) -> Connection:
    with ExitStack() as undo:
        try:
            cluster = LocalCluster(on_lost)
        except OSError as error:
            raise ClusterError(
                f"a local Ray cluster needs a directory for its logs and sockets: {error}; set RAY_TMPDIR to a "
                "directory that can be written to"
            ) from None
        undo.callback(cluster.close)
        logger.info("starting a local Ray cluster; its logs are in %s while it runs", cluster.directory)
        with _secrets_hidden(keep):
            _init(
                address="local",
                namespace=namespace,
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _temp_dir=str(cluster.directory),
            )
        connection = _connection(cluster.close, is_own=True)
        undo.pop_all()
        return connection


def _log_loss(error: ClusterLost) -> None:
    logger.error("%s", error)


def _stay(ray_address: str | None) -> Connection:
    connection = _connection(lambda: None, is_own=False)
    if ray_address not in (None, "auto", connection.address):
        raise ClusterError(
            f"option `ray_address` is {ray_address}, but this process is connected to Ray at {connection.address}"
        )
    return connection


def _resolve(ray_address: str | None) -> str | None:
    """host:port of a cluster that was found to listen; None if one is to be started."""
    if ray_address == "local":
        return None
    if ray_address is not None and ray_address != "auto":
        _refuse_client(ray_address)
        check_reachable(ray_address)  # before Ray resolves the name, and logs a stack trace if it cannot
        found = services.canonicalize_bootstrap_address(ray_address)
    else:
        _refuse_client(os.environ.get("RAY_ADDRESS", ""))
        try:
            found = services.canonicalize_bootstrap_address(ray_address)  # type: ignore[arg-type]
        except (ConnectionError, ValueError) as error:
            raise ClusterError(
                f"option `ray_address` is {ray_address}, but no Ray cluster was found here ({error}): start one by "
                "`ray start --head`, give host:port of another, or local"
            ) from None
    if found is None:
        return None
    try:
        check_reachable(found)
    except ClusterError as error:
        if ray_address is not None or os.environ.get("RAY_ADDRESS"):
            raise
        logger.info("a Ray cluster that ran here is gone (%s)", error)
        return None
    return str(found)


def _inherited(program: RayContext | None, address: str) -> dict[str, object]:
    """Options of `ray.init` that give the job what `program` has. Ray's hooks have worked on that already."""
    if program is None or program.address != address or not program.runtime_env:
        return {}
    # Under `ray job submit` Ray merges the submitted runtime_env, a part of the program's, into this one.
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    return {"runtime_env": program.runtime_env, "_skip_env_hook": True}


@contextmanager
def _secrets_hidden(keep: Sequence[str]) -> Iterator[None]:
    """Inside, the environment has none, apart from Ray's own: workers inherit it from the cluster's processes."""
    hidden = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") and is_withheld(name, value, keep)
    }
    for name in hidden:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(hidden)


def _refuse_client(address: str) -> None:
    if "://" in address:
        raise ClusterError(
            f"Ray address {address}: Ray Client is not supported, an engine must run on a node of the cluster: give "
            "host:port of its control store"
        )


def _init(**options: object) -> None:
    """`ray.init` without what it does to others: its log lines and its handling of SIGTERM."""
    # Our own lines say what is waited for; Ray's would be a second opinion in another format.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=True, logging_level=logging.ERROR, **options)  # type: ignore[arg-type]
    except Exception as error:  # Ray raises that itself, for one, when a node does not start
        ray.shutdown()
        raise ClusterError(f"Ray at {options['address']}: {' '.join(str(error).split())}") from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_sigterm)


def _connection(disconnect: Callable[[], object], *, is_own: bool) -> Connection:
    context = ray.get_runtime_context()
    return Connection(address=context.gcs_address, node_id=context.get_node_id(), is_own=is_own, _disconnect=disconnect)
