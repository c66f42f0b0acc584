"""Questions to a Ray cluster before we join it. Ray itself tries for 20 to 80 seconds what cannot succeed, ends the
process on some failures, and names a wrong token only between the lines of a stack trace."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from ray._common.usage import usage_lib
from ray._private.utils import check_version_info
from ray._raylet import Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError

from eagleray.errors import ClusterError

REACH_SECONDS = 5.0

HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""What a gRPC client says first (RFC 9113, section 3.4): the magic and an empty SETTINGS frame."""

SETTINGS_FRAME = 4


def token_source() -> str | None:
    """Where Ray's authentication token comes from, in Ray's own order; None without one."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    if path := os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return path
    default = Path.home() / ".ray" / "auth_token"
    return str(default) if default.is_file() else None


def check_in(address: str) -> None:
    """Be authenticated as the cluster wants it, unless `RAY_AUTH_MODE` says how; then `check_cluster`.

    A token is shown only to a cluster that wants one: a program that has one and expects others to show it too would be
    taken for dead by a cluster without authentication, and its actors ended as soon as they begin.
    """
    if "RAY_AUTH_MODE" not in os.environ and token_source() is not None:
        _set_mode("disabled")
        if _wants_token(address):
            _set_mode("token")
    check_cluster(address)


def _wants_token(address: str) -> bool:
    try:
        _ask(address)
    except AuthenticationError:
        return True
    except Exception:  # `check_cluster` asks again, and says what is wrong
        return False
    return False


def _ask(address: str) -> dict[str, str]:
    """The cluster's versions."""
    metadata: dict[str, str] = usage_lib.get_cluster_metadata(GcsClient(address=address))
    return metadata


def _set_mode(mode: str) -> None:
    os.environ["RAY_AUTH_MODE"] = mode
    Config.initialize("")  # Ray read its configuration when it was imported


def check_reachable(address: str) -> None:
    """Raises `ClusterError`, within seconds, unless a gRPC server listens at `address` (host:port)."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS) as connection:
            if _is_encrypted():
                return
            connection.sendall(HTTP2_PREFACE)
            answer = connection.recv(9)
    except ValueError:
        raise ClusterError(f"Ray address {address!r} is not host:port, auto or local") from None
    except TimeoutError:
        raise ClusterError(
            f"Ray cluster {address}: no answer within {REACH_SECONDS:.0f} s; is the address that of its head node?"
        ) from None
    except OSError as error:
        raise ClusterError(
            f"Ray cluster {address}: cannot be reached ({error.strerror or error}); is it running there? "
            "`ray start --head` prints its address"
        ) from None
    if len(answer) < 4 or answer[3] != SETTINGS_FRAME:
        raise ClusterError(f"Ray cluster {address}: what listens there is not Ray's control store; is the port right?")


def check_cluster(address: str) -> None:
    """Raises `ClusterError` unless the cluster lets us in and runs the same versions of Ray and Python."""
    try:
        metadata = _ask(address)
    except AuthenticationError:
        raise ClusterError(_explain_token(address)) from None
    except Exception as error:
        # which errors Ray's client raises differs between its versions: what it says is all there is to know
        raise ClusterError(f"Ray cluster {address}: its control store does not answer: {_first_line(error)}") from error
    try:
        check_version_info(metadata, "this host")
    except RuntimeError as error:
        raise ClusterError(f"Ray cluster {address}: {_one_line(error)}") from None


def _explain_token(address: str) -> str:
    source = token_source()
    if source is None or os.environ.get("RAY_AUTH_MODE") != "token":
        return (
            f"Ray cluster {address} wants an authentication token, but this program shows none: copy ~/.ray/auth_token "
            "of its head node, or set RAY_AUTH_TOKEN (and do not set RAY_AUTH_MODE to anything but token)"
        )
    return f"Ray cluster {address} does not accept the authentication token from {source}: take its head node's"


def _is_encrypted() -> bool:
    return os.environ.get("RAY_USE_TLS", "0").lower() not in ("", "0", "false")


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
