"""The deployment class of `serve.build_app`, and the instance of eagleray in each of its replicas.

Ray Serve makes the object, builds its application, checks its health, and deletes it when the replica is drained.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from contextlib import AsyncExitStack
from typing import Any

import msgspec
from ray import serve
from ray.serve.exceptions import RayServeException
from starlette.types import ASGIApp

from eagleray.cluster.actor_process import undo_low_priority, undo_omp_threads
from eagleray.cluster.context import current_ray_context
from eagleray.config.log_config import set_up_log
from eagleray.config.sections import Config
from eagleray.errors import ClusterError
from eagleray.instance import LocalInstance
from eagleray.metrics.ledger import Ledger
from eagleray.preflight import checked_config
from eagleray.process.gc_freeze import freeze_gc
from eagleray.serve.adapter_source import AdapterSource, FindAdapter, adapter_capacity
from eagleray.serve.adapters import AdapterCache
from eagleray.serve.asgi import BehindProxy
from eagleray.serve.autoscaling import RUNNING, WAITING
from eagleray.serve.metrics_mirror import MetricsMirror
from eagleray.server.app import create_service_app
from eagleray.server.service import Service
from eagleray.server.user_middleware import with_middleware

MAX_NAME_CHARS = 64
"""Longest name of an instance."""


class ServedInstance:
    """An instance inside a replica: its engines, its application, and its metrics as those of Ray. Open one with
    `open`, in the event loop of the deployment class; `close` stops the engines."""

    def __init__(self, instance: LocalInstance, app: ASGIApp, exit_stack: AsyncExitStack) -> None:
        self.instance = instance
        self.app = app
        self._exit_stack = exit_stack

    @classmethod
    async def open(
        cls, config: Config, *, find_adapter: FindAdapter, num_adapters: int, has_ray_metrics: bool = True
    ) -> ServedInstance:
        """Start the engines, and wait until they serve.

        `find_adapter` returns the directory of an adapter that a request names; `num_adapters` of them are kept loaded.
        `has_ray_metrics`: whether metrics of Ray have the instance's values. Raises `UserError` or `EngineFailed`, and
        leaves nothing behind then.
        """
        name = _instance_name()
        undo_omp_threads()
        undo_low_priority()
        set_up_log("replica", config)
        config = await asyncio.to_thread(checked_config, config)
        execution = msgspec.structs.replace(config.execution, instance_name=name)
        config = msgspec.structs.replace(config, execution=execution)
        async with AsyncExitStack() as stack:
            instance = await LocalInstance.start(config, current_ray_context())
            stack.push_async_callback(instance.stop)
            directory = instance.supervisor.runtime_dir / "metrics"
            ledger = stack.enter_context(contextlib.closing(Ledger.open(directory, 0)))
            service = Service(instance.client, config, ledger)
            cache = AdapterCache(instance, find_adapter, capacity=num_adapters)
            app = create_service_app(
                service, config, has_access_log=True, has_local_clients=False, around_routes=cache.around
            )
            if has_ray_metrics:
                mirror = asyncio.create_task(MetricsMirror(service.metrics.families).run(), name="metrics-mirror")
                stack.callback(mirror.cancel)
            served = cls(instance, BehindProxy(with_middleware(app, config.serving.middleware)), stack.pop_all())
            freeze_gc()
            return served

    def check_health(self) -> None:
        """Raise the cause if the instance has given up. Engines that restart and pauses are no reason to replace the
        replica: requests wait for their end."""
        failed = self.instance.supervisor.failed
        if failed.done():
            failed.result()

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of sequences for the policy of `autoscaling`."""
        client = self.instance.client
        stats = client.stats.values()
        running, waiting = sum(one.num_running for one in stats), sum(one.num_waiting for one in stats)
        # requests that wait for an engine to be started again are in no engine's stats
        return {RUNNING: running, WAITING: max(waiting, client.num_requests - running)}

    async def close(self) -> None:
        """Stop the engines. Running requests end. Idempotent."""
        await self._exit_stack.aclose()


@serve.ingress()
class ServeReplica:
    """A replica. Its engines are children of this process or actors in its placement group, never a part of this
    process: when one of them is killed, the replica and its streams continue."""

    def __init__(self, config: Config, adapters: AdapterSource) -> None:
        self._config = config
        self._adapters = adapters
        self._served: ServedInstance | None = None
        """The instance, while its engines are there."""

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engines and return the application. Called once."""
        self._served = await ServedInstance.open(
            self._config, find_adapter=self._adapters.find, num_adapters=adapter_capacity(self._config)
        )
        return self._served.app

    async def check_health(self) -> None:
        """Raise the cause if the instance has given up, so that Serve replaces the replica."""
        if self._served is not None:
            self._served.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers for the autoscaling policy."""
        return {} if self._served is None else self._served.autoscaling_stats()

    async def __del__(self) -> None:
        """Stop the engines. Serve calls this when requests have finished, or when it replaces the replica."""
        if self._served is not None:
            await self._served.close()


def _instance_name() -> str:
    """Return the name of this replica's instance, by which its actors in the cluster are named.

    Raises `ClusterError` outside of a replica.
    """
    try:
        replica: Any = serve.get_replica_context().replica_id
    except RayServeException:
        raise ClusterError(
            "a replica of eagleray needs a Ray cluster: deploy it by `ray.serve.run`, without local testing mode"
        ) from None
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{replica.deployment_id.name}-{replica.unique_id}")
    return name[-MAX_NAME_CHARS:]
