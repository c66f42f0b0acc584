"""The ASGI application: every route, made from a client of the engines and the configuration.

Owns nothing; driven by uvicorn, one call for each HTTP request.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from eagleray.client.client import Client
from eagleray.config.sections import Config
from eagleray.config.serving import ServingConfig
from eagleray.metrics.ledger import Ledger
from eagleray.server.anthropic.route import CountTokensRoute, ParsedMessages
from eagleray.server.collective_rpc import CollectiveRpcRoute
from eagleray.server.control import ControlRoutes
from eagleray.server.dashboard.routes import DashboardRoutes
from eagleray.server.endpoint import Endpoint, Operation, RequestMiddleware
from eagleray.server.error_responses import UNKNOWN_ROUTE, RefusedRequest
from eagleray.server.generate import ParsedGenerate, ParsedSkyrlGenerate
from eagleray.server.generation_route import GenerationRoute
from eagleray.server.http_responses import json_response
from eagleray.server.invocations import InvocationRoute, index_endpoint
from eagleray.server.lora_routes import lora_endpoints
from eagleray.server.openai.chat import ParsedChat
from eagleray.server.openai.chat_batch import ParsedChatBatch
from eagleray.server.openai.completions import ParsedCompletion
from eagleray.server.openai.models import ModelRoutes
from eagleray.server.openai.responses_api.route import InputTokensRoute, ParsedResponse, kept_response_endpoints
from eagleray.server.openapi import describe
from eagleray.server.pooling.routes import PoolingRoutes
from eagleray.server.render import RenderRoute
from eagleray.server.scaling_routes import ScalingRoutes
from eagleray.server.server_info import ServerInfoRoute
from eagleray.server.service import Service
from eagleray.server.sglang.control import sglang_control_endpoints
from eagleray.server.sglang.generate import SGLangGenerateRoute
from eagleray.server.sglang.status import SGLangServerInfoRoute, SGLangStatusRoutes
from eagleray.server.sglang.weights import sglang_weight_endpoints
from eagleray.server.status import StatusRoutes
from eagleray.server.tokenizer_info import TokenizerInfoRoute
from eagleray.server.tokens import TokenRoutes
from eagleray.server.weight_checker import WeightCheckerRoute
from eagleray.server.weight_routes import weight_endpoints


def create_app(client: Client, config: Config, ledger: Ledger, *, has_access_log: bool = False) -> RequestMiddleware:
    """Return the application, which sends requests to `client` and counts in `ledger`. The caller closes both.
    `has_access_log`: whether requests are logged, as the options of the HTTP server say.

    Raises `CheckpointError` for an invalid generation_config.json.
    """
    return create_service_app(Service(client, config, ledger), config, has_access_log=has_access_log)


def create_service_app(
    service: Service,
    config: Config,
    *,
    has_access_log: bool = False,
    has_local_clients: bool = True,
    around_routes: Callable[[ASGIApp], ASGIApp] | None = None,
) -> RequestMiddleware:
    """Return the application around `service`. `has_local_clients`: whether clients whose connection comes from this
    host may call control routes without a key; not so where that is the connection of a proxy. `around_routes`: puts
    middleware around the routes, behind the check of keys, whose errors become answers like those of the routes."""
    endpoints = list_endpoints(service, config)
    # `methods=None`: an endpoint refuses other methods itself, so that the refusal looks like every other error.
    routes = [Route(endpoint.pattern, endpoint, methods=None) for endpoint in endpoints]
    router = Router(routes, redirect_slashes=False, default=_unknown_route)
    return RequestMiddleware(
        router if around_routes is None else around_routes(router),
        endpoints,
        config,
        service.metrics.requests,
        has_access_log=has_access_log,
        has_local_clients=has_local_clients,
    )


def list_endpoints(service: Service, config: Config) -> list[Endpoint]:
    """Return every endpoint of a server with these options, /openapi.json last."""
    has_sglang = config.serving.enable_sglang_api
    endpoints = [
        *StatusRoutes(service).endpoints(),
        *(SGLangServerInfoRoute if has_sglang else ServerInfoRoute)(service, config).endpoints(),
        *ModelRoutes(service).endpoints(),
        *GenerationRoute(service, ParsedCompletion).endpoints(),
        *GenerationRoute(service, ParsedChat).endpoints(),
        *GenerationRoute(service, ParsedResponse).endpoints(),
        *InputTokensRoute(service).endpoints(),
        *kept_response_endpoints(),
        *GenerationRoute(service, ParsedChatBatch).endpoints(),
        *RenderRoute(service, ParsedCompletion, is_list=True).endpoints(),
        *RenderRoute(service, ParsedChat, is_list=False).endpoints(),
        *GenerationRoute(service, ParsedMessages).endpoints(),
        *CountTokensRoute(service).endpoints(),
        *GenerationRoute(service, ParsedGenerate).endpoints(),
        *GenerationRoute(service, ParsedSkyrlGenerate).endpoints(),
        *PoolingRoutes(service, has_pair_template=config.model.chat_template is not None).endpoints(),
        *TokenRoutes(service).endpoints(),
        *ControlRoutes(service, workers_per_engine=config.parallel.world_size).endpoints(),
        *weight_endpoints(service),
        *ScalingRoutes(service).endpoints(),
        *CollectiveRpcRoute(
            service,
            is_control=not config.serving.enable_collective_rpc,
            has_extension=config.execution.worker_extension_cls is not None,
        ).endpoints(),
        *WeightCheckerRoute(service).endpoints(),
        *lora_endpoints(service),
    ]
    if has_sglang:
        endpoints += [
            *SGLangGenerateRoute(service).endpoints(),
            *SGLangStatusRoutes(service, config).endpoints(),
            *sglang_control_endpoints(service),
            *sglang_weight_endpoints(service),
        ]
    if config.serving.enable_tokenizer_info_endpoint:
        endpoints += TokenizerInfoRoute(service, config.model).endpoints()
    if not config.serving.disable_dashboard:
        endpoints += DashboardRoutes(service, config).endpoints()
    endpoints += InvocationRoute(service, endpoints).endpoints()
    endpoints.append(index_endpoint(endpoints, service.version, config.serving.url_prefix))
    endpoints.append(_openapi_endpoint(endpoints, service, config.serving))
    return endpoints


def _openapi_endpoint(endpoints: list[Endpoint], service: Service, options: ServingConfig) -> Endpoint:
    """Return the endpoint of /openapi.json, which is in the document too."""

    @functools.cache
    def document() -> dict[str, Any]:
        return describe(
            [*endpoints, itself],
            version=service.version,
            needs_key=bool(options.api_key),
            control_needs_key=bool(options.api_key or options.admin_api_key),
            root_path=options.url_prefix,
        )

    async def show(request: Request) -> Response:
        return json_response(document())

    itself = Endpoint("/openapi.json", get=Operation(show, "This document."))
    return itself


async def _unknown_route(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        raise RefusedRequest(f"there is no {scope['path']} here; /openapi.json lists all routes", UNKNOWN_ROUTE)
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1000})
