"""/server_info: the configuration of this deployment, and its engines."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from eagleray.config.sections import Config
from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response
from eagleray.server.service import Service

HIDDEN = "(hidden)"


class EngineLoad(msgspec.Struct, frozen=True, kw_only=True):
    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int


class EngineEntry(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    incarnation: Annotated[int, Meta(description="Number of restarts.")]
    load: Annotated[EngineLoad | None, Meta(description="null before the first report.")]
    info: EngineInfo


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    ranks: Annotated[list[int], Meta(description="Ranks of all engines of this server, present or not.")]
    engines: Annotated[list[EngineEntry], Meta(description="Engines that are present.")]
    cause: Annotated[str | None, Meta(description="Why no engine is present; null if one is.")]
    config: Annotated[dict[str, dict[str, Any]], Meta(description="Every option by section, without possible secrets.")]


class ServerInfoRoute:
    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        self._config = _without_secrets(config)

    def endpoints(self) -> list[Endpoint]:
        show = Operation(self.show, "The configuration, and the engines that are present.", response=ServerInfo)
        return [Endpoint("/server_info", get=show)]

    async def show(self, request: Request) -> Response:
        return json_response(self._answer())

    def _answer(self) -> ServerInfo:
        client = self._service.client
        engines = sorted(client.engines.items(), key=lambda entry: entry[0].rank)
        return ServerInfo(
            version=self._service.version,
            ranks=list(self._service.ranks),
            engines=[_entry(engine, info, client.stats.get(engine)) for engine, info in engines],
            cause=client.cause,
            config=self._config,
        )


def _entry(engine: EngineId, info: EngineInfo, stats: EngineStats | None) -> EngineEntry:
    load = None
    if stats is not None:
        load = EngineLoad(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            num_kv_blocks=stats.num_kv_blocks,
            num_free_kv_blocks=stats.num_free_kv_blocks,
        )
    return EngineEntry(rank=engine.rank, incarnation=engine.incarnation, load=load, info=info)


def _without_secrets(config: Config) -> dict[str, dict[str, Any]]:
    """Return the configuration without API keys and tokens, and without the values of variables for Ray's workers."""
    shown: dict[str, dict[str, Any]] = msgspec.to_builtins(config)
    for name in ("api_key", "admin_api_key"):
        del shown["serving"][name]
    del shown["model"]["hf_token"]
    if shown["observability"]["log_config_file"] is not None:
        shown["observability"]["log_config_file"] = HIDDEN  # handlers may have keys of services
    if "@" in (shown["observability"]["otlp_traces_endpoint"] or ""):
        shown["observability"]["otlp_traces_endpoint"] = HIDDEN  # a password
    runtime_env = shown["ray"]["ray_runtime_env"]
    if isinstance(variables := runtime_env.get("env_vars"), dict):
        shown["ray"]["ray_runtime_env"] = runtime_env | {"env_vars": dict.fromkeys(variables, HIDDEN)}
    return shown
