"""Control routes of weight updates. The names and answers are those of vLLM.

/init_weight_transfer_engine                                      once, with the trainer's address
/start_weight_update, /update_weights …, /finish_weight_update    for each update
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from eagleray.client.control_requests import init_transfer_request, start_request, update_request
from eagleray.messages.control import (
    AbortWeightUpdate,
    FinishWeightUpdate,
    GetWeightInfo,
    SetWeightVersion,
    ShutdownWeightTransfer,
)
from eagleray.server.control import SuccessResponse, control_endpoint
from eagleray.server.endpoint import Endpoint
from eagleray.server.parameters import ControlParameters
from eagleray.server.service import Service


class InitParameters(ControlParameters, kw_only=True):
    init_info: Annotated[dict[str, Any], Meta(description="Fields of the transfer's backend.")]


class StartParameters(ControlParameters, kw_only=True):
    is_checkpoint_format: Annotated[bool, Meta(description="Only true: names are those of the checkpoint.")] = True


class UpdateParameters(ControlParameters, kw_only=True):
    update_info: Annotated[
        dict[str, Any] | list[dict[str, Any]] | None,
        Meta(description="Names, shapes and dtypes of the tensors; a list has an entry for each worker."),
    ] = None
    weight_dir: Annotated[
        str | None, Meta(description="Directory of a checkpoint: it is read, and the update finished, in this call.")
    ] = None
    weight_version: Annotated[str | None, Meta(description="Name of the weights, with `weight_dir`.")] = None


class FinishParameters(ControlParameters, kw_only=True):
    weight_version: Annotated[str | None, Meta(description="Name of the weights. Default: the update's number.")] = None
    require_complete: Annotated[bool, Meta(description="Refuse an update that lacks a weight.")] = False


class VersionParameters(ControlParameters, kw_only=True):
    new_version: str


class UpdateMessage(msgspec.Struct, frozen=True, kw_only=True):
    message: str


class StartResponse(UpdateMessage, frozen=True, kw_only=True):
    update: int


class UpdateResponse(UpdateMessage, frozen=True, kw_only=True):
    num_tensors: int
    num_bytes: int
    weight_version: str | msgspec.UnsetType = msgspec.UNSET
    update: int | msgspec.UnsetType = msgspec.UNSET


class FinishResponse(UpdateMessage, frozen=True, kw_only=True):
    weight_version: str
    update: int
    num_tensors: int
    num_missing: int
    missing: list[str]


class VersionResponse(SuccessResponse, frozen=True):
    new_version: str


class OperationInfo(msgspec.Struct, frozen=True):
    """The call that is being executed."""

    name: str
    id: str
    seconds: float
    members: dict[str, str]
    num_queued: int


class EngineWeights(msgspec.Struct, frozen=True):
    """Weights of one engine."""

    rank: int
    incarnation: int
    weight_version: str | None
    state: Annotated[str, Meta(description="starting, waiting (for weights or the end of an update) or ready.")]


class WeightInfo(msgspec.Struct, frozen=True):
    """Weights of the instance."""

    weight_version: str
    update: Annotated[int, Meta(description="Number of the last update that an engine serves.")]
    required: Annotated[int, Meta(description="Number of the last update that was committed.")]
    instance: Annotated[
        str, Meta(description="Id of the instance. A restart makes another one, with the checkpoint's weights.")
    ]
    state: str
    is_paused: bool
    asleep: list[str]
    operation: OperationInfo | None
    dropped: Annotated[
        str | None,
        Meta(description="Cause for which the last update was dropped, if that happened in the present pause."),
    ]
    engines: list[EngineWeights]


def weight_endpoints(service: Service) -> list[Endpoint]:
    """Return the endpoints of weight updates."""
    return [
        control_endpoint(
            "/init_weight_transfer_engine",
            service,
            InitParameters,
            lambda given: init_transfer_request({"init_info": given.init_info}),
            "Connect to the trainer.",
            UpdateMessage,
        ),
        control_endpoint(
            "/shutdown_weight_transfer_engine",
            service,
            ControlParameters,
            lambda given: ShutdownWeightTransfer(),
            "Disconnect from the trainer.",
            UpdateMessage,
        ),
        control_endpoint(
            "/start_weight_update",
            service,
            StartParameters,
            lambda given: start_request(given.is_checkpoint_format),
            "Open a weight update.",
            StartResponse,
        ),
        control_endpoint(
            "/update_weights",
            service,
            UpdateParameters,
            lambda given: update_request(msgspec.structs.asdict(given)),
            "Receive weights.",
            UpdateResponse,
        ),
        control_endpoint(
            "/finish_weight_update",
            service,
            FinishParameters,
            lambda given: FinishWeightUpdate(
                weight_version=given.weight_version, require_complete=given.require_complete
            ),
            "Commit the open weight update.",
            FinishResponse,
        ),
        control_endpoint(
            "/abort_weight_update",
            service,
            ControlParameters,
            lambda given: AbortWeightUpdate(),
            "Drop the open weight update.",
            StartResponse,
        ),
        control_endpoint(
            "/update_weight_version",
            service,
            VersionParameters,
            lambda given: SetWeightVersion(given.new_version),
            "Rename the weights.",
            VersionResponse,
        ),
        control_endpoint(
            "/weight_info",
            service,
            ControlParameters,
            lambda given: GetWeightInfo(),
            "The weights of the instance and of each engine.",
            WeightInfo,
            method="get",
        ),
    ]
