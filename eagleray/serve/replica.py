"""The deployment class of `serve.build_app`: one replica is one instance of eagleray.

Ray Serve makes the object, builds its application, checks its health, and deletes it when the replica is drained.
"""

from __future__ import annotations

from ray import serve
from starlette.types import ASGIApp

from eagleray.config.sections import Config
from eagleray.serve.adapters import AdapterSource, adapter_capacity
from eagleray.serve.served_instance import ServedInstance


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
