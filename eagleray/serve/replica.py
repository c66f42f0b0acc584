"""The deployment class: one replica is one instance of eagleray, whose engines are processes or Ray actors.

Ray Serve makes the object, builds its application, checks its health, and deletes it when the replica is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from contextlib import AsyncExitStack

import msgspec
from ray import serve
from starlette.types import ASGIApp

from eagleray.cluster.actor_process import undo_low_priority, undo_omp_threads
from eagleray.cluster.context import current_ray_context
from eagleray.config.log_config import set_up_log
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.instance import LocalInstance
from eagleray.log import get_logger
from eagleray.metrics.ledger import Ledger
from eagleray.preflight import checked_model
from eagleray.process.gc_freeze import freeze_gc
from eagleray.serve.asgi import BehindProxy
from eagleray.serve.autoscaling import RUNNING, WAITING
from eagleray.server.app import create_service_app
from eagleray.server.service import Service
from eagleray.server.user_middleware import with_middleware

logger = get_logger(__name__)

MAX_NAME_CHARS = 64


@serve.ingress()
class ServeReplica:
    """A replica. Its engines are children of this process or actors in its placement group, never a part of this
    process: when one of them is killed, the replica and its streams continue."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._exit_stack = AsyncExitStack()
        """Stops the engines."""
        self._instance: LocalInstance

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engines and return the application. Called once. Raises `UserError` or `EngineFailed`, and leaves
        nothing behind then."""
        undo_omp_threads()
        undo_low_priority()
        set_up_log("replica", self._config)
        context = current_ray_context()
        if context is None:
            raise ClusterError(
                "a replica of eagleray needs a Ray cluster: deploy it by `ray.serve.run`, without local testing mode"
            )
        model = await asyncio.to_thread(checked_model, self._config.model)
        execution = msgspec.structs.replace(self._config.execution, instance_name=_instance_name())
        config = msgspec.structs.replace(self._config, model=model, execution=execution)
        async with AsyncExitStack() as stack:
            self._instance = await LocalInstance.start(config, context)
            stack.push_async_callback(self._instance.stop)
            runtime_dir = self._instance.supervisor.runtime_dir
            ledger = stack.enter_context(contextlib.closing(Ledger.open(runtime_dir / "metrics", 0)))
            service = Service(self._instance.client, config, ledger)
            app = create_service_app(service, config, has_access_log=True, has_local_clients=False)
            served = BehindProxy(with_middleware(app, config.serving.middleware))
            freeze_gc()
            self._exit_stack = stack.pop_all()
            return served

    async def check_health(self) -> None:
        """Raise the cause if the instance has given up. Engines that restart and pauses are no reason to replace the
        replica: requests wait for their end."""
        failed = self._instance.supervisor.failed
        if failed.done() and (error := failed.exception()) is not None:
            raise error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of sequences for the policy of `autoscaling`."""
        client = self._instance.client
        running = sum(stats.num_running for stats in client.stats.values())
        return {RUNNING: running, WAITING: max(0, client.num_in_flight - running)}

    async def __del__(self) -> None:
        """Stop the engines. Serve calls this when requests have finished, or when it restarts the replica."""
        await self._exit_stack.aclose()


def _instance_name() -> str:
    """Return the name of this replica's instance, by which its actors in the cluster are named."""
    replica = serve.get_replica_context().replica_id
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{replica.deployment_id.name}-{replica.unique_id}")
    return name[-MAX_NAME_CHARS:]
