"""/v1/models: the names of the model that is served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from eagleray.messages.adapters import Adapter
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.http_responses import json_response
from eagleray.server.openai.responses import ModelCard, ModelList
from eagleray.server.service import Service


class ModelRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service

    def endpoints(self) -> list[Endpoint]:
        every = Operation(self.list_models, "The names of the model and of its adapters.", response=ModelList)
        one = Operation(self.show_model, "The model of one name.", response=ModelCard, error_statuses=(404,))
        return [Endpoint("/v1/models", get=every), Endpoint("/v1/models/{model:path}", get=one)]

    async def list_models(self, request: Request) -> Response:
        service = self._service
        adapters = [self._card(adapter.name, adapter) for adapter in service.client.state.adapters]
        return json_response(ModelList(data=[*(self._card(name) for name in service.model_names), *adapters]))

    async def show_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        return json_response(self._card(name, self._service.find_model(name)))

    def _card(self, name: str, adapter: Adapter | None = None) -> ModelCard:
        engine = self._service.client.engine_info
        return ModelCard(
            id=name,
            created=self._service.created,
            root=self._service.model_root if adapter is None else adapter.path,
            parent=None if adapter is None else self._service.model_name,
            max_model_len=engine.max_model_len if engine else None,
        )
