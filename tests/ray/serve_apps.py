"""Applications of Ray Serve on the tests' cluster: they are deployed for a test, and reached through Serve's proxy."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from processes import children_of
from ray._private.state import actors

from eagleray.serve import build_app

TESTS = Path(__file__).parent.parent
SECONDS = 60.0


@contextlib.contextmanager
def deployed(model: str | None, *, route_prefix: str = "/", **options: Any) -> Iterator[httpx.Client]:
    """Deploy an application and yield a client of Serve's proxy; remove everything at the end."""
    from ray import serve  # here, because it takes seconds, and every worker of pytest imports this module

    port = _free_port()
    deployment = options.pop("deployment", {})
    env_vars = {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS), str(TESTS / "ray")])}
    actor_options = {"runtime_env": {"env_vars": env_vars}} | deployment.get("ray_actor_options", {})
    given = {"graceful_shutdown_wait_loop_s": 0.1} | deployment | {"ray_actor_options": actor_options}
    small = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 512, "max_num_seqs": 16} | options
    try:
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        serve.run(build_app(model, deployment=given, **small), route_prefix=route_prefix)
        url = f"http://127.0.0.1:{port}{route_prefix.rstrip('/')}"
        with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as http:
            yield http
    finally:
        serve.shutdown()


def replica_pids() -> list[int]:
    """Return the processes of the replicas."""
    return [
        int(entry["Pid"])
        for entry in actors().values()
        if entry["State"] == "ALIVE" and entry["ActorClassName"].startswith("ServeReplica:")
    ]


def engine_process(replica: int) -> int:
    """Return the process of the only engine of a replica."""
    (pid,) = [pid for pid in children_of(replica) if b"engine-" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return pid


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
