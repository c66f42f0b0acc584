"""The application with SGLang's routes, before the real state machine of an instance with engines in memory."""

from __future__ import annotations

from typing import Any

import msgspec
from control_fakes import SteeredFleet

from eagleray.identity import ClientId
from eagleray.messages.control import ControlCall, ControlRequest, ControlReturned, GetWeightInfo, StateChanged
from eagleray.messages.lifecycle import Attach


class SteeredApi:
    """`post` and `get` return the status and the body of a call's answer."""

    def __init__(self, api: Any) -> None:
        self.api = api
        self.fleet = SteeredFleet()
        self._requests: list[ControlRequest] = []
        api.engine.control = self._answer
        api.deliver(Attach(ClientId("test", 0), "supervisor", []))

    def post(self, path: str, body: Any = None) -> tuple[int, Any]:
        response = self.api.post(path, body)
        return response.status_code, response.json()

    def get(self, path: str) -> tuple[int, Any]:
        response = self.api.get(path)
        return response.status_code, response.json()

    def pop_requests(self) -> list[ControlRequest]:
        """Return the calls since the last time, without those that only ask for the state."""
        requests, self._requests = self._requests, []
        return [request for request in requests if not isinstance(request, GetWeightInfo)]

    @property
    def version(self) -> str:
        return self.fleet.control.state.weight_version

    def _answer(self, call: ControlCall) -> ControlReturned:
        self._requests.append(call.request)
        number = self.fleet.call(call.request, timeout=call.timeout, operation_id=call.operation_id)
        self.fleet.settle()
        self.api.engine.deliver(StateChanged(self.fleet.published))
        return msgspec.structs.replace(self.fleet.answers[number], call_id=call.call_id)
