"""Connection to a Ray cluster, which is joined, or started on this host.

A cluster is checked before it is joined: Ray itself tries for 20 to 80 seconds what cannot succeed, ends the process on
some failures, and names a wrong token only between the lines of a stack trace.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._common.usage import usage_lib
from ray._private import services
from ray._private.utils import check_version_info
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from eagleray.cluster.environment import is_withheld
from eagleray.cluster.instances import check_name_is_free
from eagleray.cluster.local_cluster import LocalCluster, OnLost, list_running_clusters
from eagleray.cluster.timeouts import PREFLIGHT_SECONDS
from eagleray.errors import ClusterError, ClusterLost
from eagleray.log import get_logger
from eagleray.messages.workers import RayContext

logger = get_logger(__name__)

OBJECT_STORE_BYTES = 256 * 2**20
"""Size of a local cluster's object store. Nothing large goes through it."""

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""First bytes of a gRPC client (RFC 9113, section 3.4): the magic and an empty SETTINGS frame."""

SETTINGS_FRAME = 4


@dataclass(frozen=True)
class Connection:
    """Connection of this process, a driver of the cluster."""

    address: str
    node_id: str
    """Node that this process runs on."""
    is_own: bool
    """Whether the cluster is a local one that this process has started."""
    _disconnect: Callable[[], object]

    def close(self) -> None:
        """Disconnect; a local cluster that this process started is stopped."""
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

    `ray_address`: host:port; `auto` for a cluster that runs here (or `RAY_ADDRESS`); `local` for a new one on this
    host; None for the one that `auto` finds, or else a new one. A process that is a driver already keeps its
    connection, also after `close`. In the cluster of `program`, this process's job gets that program's runtime_env,
    which Ray hands down to the actors; Ray keeps the packages that it names while one of the two jobs runs.

    A cluster that is started here inherits the environment, but of variables that may be secrets only the ones that
    `keep` (patterns) names. When it dies this process exits, after a call of `on_lost` with the cause. Raises
    `ClusterError`.
    """
    if ray.is_initialized():
        return _reuse(ray_address)
    address = find_cluster(ray_address)
    if address is None:
        return _start_local(namespace, keep, on_lost or _log_loss)
    check_cluster(address)
    _init(address=address, namespace=namespace, **_inherited(program, address))
    try:
        check_name_is_free(namespace)
    except BaseException:
        ray.shutdown()
        raise
    return _connection(ray.shutdown, is_own=False)


def describe_cluster() -> dict[str, str]:
    """Return Ray's version, the source of its token, and the cluster that an engine would join here, or why it could
    not. Connects to no cluster."""
    try:
        address = find_cluster(None)
        if address is None:
            cluster = "none runs here: an engine would start one"
        else:
            check_cluster(address)
            cluster = f"{address}, can be joined"
    except ClusterError as error:
        cluster = str(error)
    return {"version": ray.__version__, "token": token_source() or "none", "cluster": cluster}


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


def _reuse(ray_address: str | None) -> Connection:
    connection = _connection(lambda: None, is_own=False)
    if ray_address not in (None, "auto", connection.address):
        raise ClusterError(
            f"option `ray_address` is {ray_address}, but this process is connected to Ray at {connection.address}"
        )
    return connection


def find_cluster(ray_address: str | None) -> str | None:
    """Return host:port of a cluster that accepts connections; None if one must be started. `ray_address`: see
    `connect`. Raises `ClusterError`."""
    if ray_address in (None, "auto") and (named := os.environ.get("RAY_ADDRESS")):
        try:
            return _find(named)
        except ClusterError as error:
            raise ClusterError(f"variable RAY_ADDRESS: {error}") from None
    return _find(ray_address)


def _find(address: str | None) -> str | None:
    """Return host:port as `find_cluster` does, without a look at `RAY_ADDRESS`."""
    if address == "local":
        return None
    if address is None or address == "auto":
        return _find_recorded(is_needed=address == "auto")
    _refuse_client(address)
    check_reachable(address)  # before Ray resolves the name, and logs a stack trace if it cannot
    found = str(services.canonicalize_bootstrap_address(address))
    check_reachable(found)
    return found


def _find_recorded(*, is_needed: bool) -> str | None:
    """Return the address that `ray start` has recorded on this host, or, if a cluster is needed, of any that runs
    here."""
    try:
        found = services.canonicalize_bootstrap_address("auto" if is_needed else None)  # type: ignore[arg-type]
    except (ConnectionError, ValueError) as error:
        raise ClusterError(
            f"the address of Ray is auto, but no Ray cluster was found here ({error}): start one by "
            "`ray start --head`, give host:port of another, or local"
        ) from None
    if found is None:
        if others := list_running_clusters():
            logger.warning(
                "a Ray cluster runs here at %s, but its address is not recorded, so it is not joined: give the address "
                "as --ray-address or RAY_ADDRESS to join it",
                " and ".join(others),
            )
        return None
    try:
        check_reachable(found)
    except ClusterError as error:
        if is_needed:
            raise
        logger.info("a Ray cluster that ran here is gone (%s)", error)
        return None
    return str(found)


def _inherited(program: RayContext | None, address: str) -> dict[str, object]:
    """Return options of `ray.init` that give the job the runtime_env of `program`, which Ray's hooks have processed
    already."""
    if program is None or program.address != address or not program.runtime_env:
        return {}
    # Under `ray job submit` Ray merges the submitted runtime_env, a part of the program's, into this one.
    os.environ["RAY_OVERRIDE_JOB_RUNTIME_ENV"] = "1"
    return {"runtime_env": program.runtime_env, "_skip_env_hook": True}


@contextmanager
def _secrets_hidden(keep: Sequence[str]) -> Iterator[None]:
    """Remove secrets from the environment meanwhile, except Ray's own: workers inherit it from the cluster's
    processes."""
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
    """Call `ray.init` without its side effects: its log lines and its handling of SIGTERM."""
    # Our own log lines say what an engine waits for; Ray's would repeat that in another format.
    os.environ.setdefault("RAY_SCHEDULER_EVENTS", "0")
    in_main_thread = threading.current_thread() is threading.main_thread()
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(log_to_driver=True, logging_level=logging.ERROR, **options)  # type: ignore[arg-type]
    except Exception as error:  # Ray raises a plain Exception when a node does not start
        ray.shutdown()
        raise ClusterError(f"Ray at {options['address']}: {' '.join(str(error).split())}") from error
    finally:
        if in_main_thread:
            signal.signal(signal.SIGTERM, on_sigterm)


def _connection(disconnect: Callable[[], object], *, is_own: bool) -> Connection:
    context = ray.get_runtime_context()
    return Connection(address=context.gcs_address, node_id=context.get_node_id(), is_own=is_own, _disconnect=disconnect)


def token_source() -> str | None:
    """Return the source of Ray's authentication token, in Ray's own order; None without one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    default = Path.home() / ".ray" / "auth_token"
    return str(default) if default.is_file() else None


def _authenticate(address: str) -> None:
    """Set Ray's authentication mode to the one that the cluster has, unless `RAY_AUTH_MODE` sets it.

    A token is sent only to a cluster that demands one. A program that sends a token expects others to send it too: it
    would be considered dead by a cluster without authentication, and its actors would exit as soon as they start.
    """
    if "RAY_AUTH_MODE" not in os.environ and token_source() is not None:
        _set_auth_mode("disabled")
        if _demands_token(address):
            _set_auth_mode("token")


def _demands_token(address: str) -> bool:
    try:
        _read_versions(address)
    except AuthenticationError:
        return True
    except Exception:  # `check_cluster` asks again, and reports what is wrong
        return False
    return False


def _read_versions(address: str) -> dict[str, str]:
    metadata: dict[str, str] = usage_lib.get_cluster_metadata(GcsClient(address=address))
    return metadata


def _set_auth_mode(mode: str) -> None:
    os.environ["RAY_AUTH_MODE"] = mode
    Config.initialize("")  # Ray read its configuration when it was imported


def check_reachable(address: str) -> None:
    """Raise `ClusterError`, within seconds, unless a gRPC server listens at `address` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PREFLIGHT_SECONDS) as connection:
            if _uses_tls():
                return
            connection.sendall(HTTP2_PREFACE)
            reply = connection.recv(9)
    except ValueError:
        raise ClusterError(f"Ray address {address!r} is not host:port, auto or local") from None
    except TimeoutError:
        raise ClusterError(
            f"Ray cluster {address}: no answer within {PREFLIGHT_SECONDS:.0f} s; is the address that of its head node?"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"Ray cluster {address}: cannot be reached ({error.strerror or error}); is it running there? "
            "`ray start --head` prints its address"
        ) from None
    if len(reply) < 4 or reply[3] != SETTINGS_FRAME:
        raise ClusterError(f"Ray cluster {address}: what listens there is not Ray's control store; is the port right?")


def check_cluster(address: str) -> None:
    """Raise `ClusterError` unless the cluster accepts this program and runs the same versions of Ray and Python. Sets
    Ray's authentication mode to that of the cluster."""
    _authenticate(address)
    try:
        metadata = _read_versions(address)
    except AuthenticationError:
        raise ClusterError(_explain_token(address)) from None
    except Exception as error:
        # the exception types of Ray's client differ between its versions: only the text is reliable
        raise ClusterError(f"Ray cluster {address}: its control store does not answer: {_first_line(error)}") from error
    try:
        check_version_info(metadata, "this host")
    except RuntimeError as error:
        raise ClusterError(f"Ray cluster {address}: {' '.join(str(error).split())}") from None


def _explain_token(address: str) -> str:
    source = token_source()
    if source is None or os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            f"Ray cluster {address} wants an authentication token, but this program shows none: copy ~/.ray/auth_token "
            "of its head node, or set RAY_AUTH_TOKEN (and do not set RAY_AUTH_MODE to anything but token)"
        )
    return f"Ray cluster {address} does not accept the authentication token from {source}: take its head node's"


def _uses_tls() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
