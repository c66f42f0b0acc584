"""Routes with SGLang's names for the configuration, the load and the health of an instance."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from eagleray.client.preprocess import Prompt
from eagleray.config.sections import Config
from eagleray.messages.sampling import SamplingParams
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response, unless_disconnected
from eagleray.server.server_info import ServerInfo, ServerInfoRoute
from eagleray.server.service import Service

HEALTH_SECONDS = 20.0
"""Time limit of the request that /health_generate sends."""


class SGLangServerInfo(ServerInfo, frozen=True, kw_only=True):
    """`ServerInfo` with the fields that trainers for SGLang read."""

    model_path: str
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    num_gpus: int
    """Number of workers: the number of ranks in a trainer's group minus one, the trainer."""
    enable_memory_saver: bool
    enable_return_routed_experts: bool


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Description of the model."""

    model_path: str
    tokenizer_path: str
    is_generation: bool = True
    weight_version: str
    architectures: list[str]


class EngineRequests(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one engine, as it last reported them."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_total_reqs: int


class Loads(msgspec.Struct, frozen=True):
    timestamp: float
    loads: list[EngineRequests]


class SGLangServerInfoRoute(ServerInfoRoute):
    def __init__(self, service: Service, config: Config) -> None:
        super().__init__(service, config)
        self._parallel = config.parallel
        self._fields: dict[str, Any] = {
            "model_path": service.model_dir,
            "tp_size": config.parallel.tensor_parallel_size,
            "pp_size": config.parallel.pipeline_parallel_size,
            "enable_memory_saver": False,  # memory can be released in any case; clients compare the option's default
            "enable_return_routed_experts": config.model.enable_return_routed_experts,
        }

    def endpoints(self) -> list[Endpoint]:
        show = Operation(self.show, "The configuration, and the engines that are present.", response=SGLangServerInfo)
        return [Endpoint(path, get=show) for path in ("/server_info", "/get_server_info")]

    def _answer(self) -> ServerInfo:
        parallel, num_engines = self._parallel, len(self._service.ranks)
        return SGLangServerInfo(
            dp_size=num_engines,
            ep_size=parallel.tensor_parallel_size * num_engines if parallel.enable_expert_parallel else 1,
            num_gpus=parallel.world_size * num_engines,
            **msgspec.structs.asdict(super()._answer()),
            **self._fields,
        )


class SGLangStatusRoutes:
    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        self._tokenizer_path = config.model.tokenizer or service.model_dir

    def endpoints(self) -> list[Endpoint]:
        loads = Operation(self.loads, "The requests of each engine.", response=Loads)
        health = Operation(self.health, "Whether a token can be generated.", error_statuses=(503, 504))
        model = Operation(self.model, "The model.", response=ModelInfo)
        return [
            Endpoint("/v1/loads", get=loads),
            Endpoint("/health_generate", get=health),
            *(Endpoint(path, get=model) for path in ("/model_info", "/get_model_info")),
        ]

    async def model(self, request: Request) -> Response:
        service = self._service
        info = service.client.engine_info
        return json_response(
            ModelInfo(
                model_path=service.model_dir,
                tokenizer_path=self._tokenizer_path,
                weight_version=service.client.state.weight_version,
                architectures=[] if info is None else [info.architecture],
            )
        )

    async def loads(self, request: Request) -> Response:
        stats = sorted(self._service.client.stats.values(), key=lambda one: one.engine.rank)
        loads = [
            EngineRequests(
                dp_rank=one.engine.rank,
                num_running_reqs=one.num_running,
                num_waiting_reqs=one.num_waiting,
                num_total_reqs=one.num_running + one.num_waiting,
            )
            for one in stats
        ]
        return json_response(Loads(time.time(), loads))

    async def health(self, request: Request) -> Response:
        """Generate a token. While requests have to wait, as in a pause, only check that the engines are ready."""
        service = self._service
        service.check_ready()
        if service.client.state.may_step:
            await unless_disconnected(request.receive, self._generate())
        return Response()

    async def _generate(self) -> None:
        stream = self._service.client.generate(
            Prompt(token_ids=[0]),
            SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True),
            timeout=HEALTH_SECONDS,
        )
        try:
            await stream.result()
        finally:
            stream.abort()
