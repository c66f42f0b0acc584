"""Weight updates with SGLang's names. Trainers send one in many calls, each of which SGLang applies at once.

Here the calls of a pause are one update, which /continue_generation commits, so that tensors that are packed together
may come in different calls. Without a pause each call is an update, unless /begin_weight_update came.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.client.control_requests import update_request
from eagleray.errors import InvalidRequest
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    ShutdownWeightTransfer,
    StartWeightUpdate,
    UpdateWeights,
)
from eagleray.messages.plain import pack
from eagleray.server.endpoint import Endpoint
from eagleray.server.parameters import ControlParameters
from eagleray.server.service import Service
from eagleray.server.sglang.answers import ControlCaller, Outcome, sglang_endpoint

BACKENDS = {"gloo": "gloo", "nccl": "torch_nccl"}
"""Backend of torch's group → backend of the transfer."""

DEFAULT_GROUP = "weight_update_group"


class InitGroupParameters(ControlParameters, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: Annotated[int, Meta(description="Rank of the first worker of this instance.")]
    world_size: int
    group_name: str = DEFAULT_GROUP
    backend: Literal["gloo", "nccl"] = "nccl"


class DestroyGroupParameters(ControlParameters, kw_only=True):
    group_name: str = DEFAULT_GROUP


class UpdateDetails(ControlParameters, kw_only=True):
    """Fields of every update."""

    load_format: Literal["auto"] | None = None
    weight_version: Annotated[str | None, Meta(description="Name of the weights. Default: the update's number.")] = None
    flush_cache: Annotated[bool, Meta(description="No effect: cached prompts of older weights are not used again.")] = (
        True
    )
    abort_all_requests: Annotated[bool, Meta(description="End all requests first.")] = False
    torch_empty_cache: Annotated[bool, Meta(description="No effect.")] = False


class DistributedParameters(UpdateDetails, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = DEFAULT_GROUP


class DiskParameters(UpdateDetails, kw_only=True):
    model_path: Annotated[str, Meta(description="Directory of a checkpoint.")]


class TensorParameters(UpdateDetails, kw_only=True):
    serialized_named_tensors: Any = None


class WeightsCheckerParameters(ControlParameters, kw_only=True):
    action: str


class DiskOutcome(Outcome, frozen=True, kw_only=True):
    num_paused_requests: int = 0


class VersionOutcome(msgspec.Struct, frozen=True):
    weight_version: str


def sglang_weight_endpoints(service: Service) -> list[Endpoint]:
    return [
        sglang_endpoint(
            "/init_weights_update_group", service, InitGroupParameters, init_group, "Join the trainer's torch group."
        ),
        sglang_endpoint(
            "/destroy_weights_update_group",
            service,
            DestroyGroupParameters,
            destroy_group,
            "Leave that group.",
        ),
        sglang_endpoint(
            "/update_weights_from_distributed",
            service,
            DistributedParameters,
            update_from_distributed,
            "Receive weights by one broadcast each.",
        ),
        sglang_endpoint(
            "/update_weights_from_disk",
            service,
            DiskParameters,
            update_from_disk,
            "Read the weights of a checkpoint.",
            response=DiskOutcome,
        ),
        sglang_endpoint(
            "/update_weights_from_tensor", service, TensorParameters, refuse_tensors, "Refused: it needs pickle."
        ),
        sglang_endpoint("/begin_weight_update", service, ControlParameters, begin, "Open an update of several calls."),
        sglang_endpoint("/end_weight_update", service, ControlParameters, end, "Commit the open update."),
        sglang_endpoint(
            "/get_weight_version",
            service,
            ControlParameters,
            get_version,
            "The name of the weights.",
            methods=("get", "post"),
            response=VersionOutcome,
        ),
        sglang_endpoint(
            "/weights_checker", service, WeightsCheckerParameters, refuse_check, "Refused: no snapshots are kept."
        ),
    ]


async def init_group(call: ControlCaller, given: InitGroupParameters) -> Outcome:
    if (await call(GetWeightInfo()))["state"] == "updating":
        await call(AbortWeightUpdate())  # left open by a trainer that died
    info = {name: getattr(given, name) for name in InitGroupParameters.__annotations__}
    await call(InitWeightTransfer(init_info=info | {"backend": BACKENDS[given.backend]}))
    return Outcome(message=f"The workers have joined the group {given.group_name}.")


async def destroy_group(call: ControlCaller, given: DestroyGroupParameters) -> Outcome:
    await call(ShutdownWeightTransfer())
    return Outcome(message=f"The workers have left the group {given.group_name}.")


async def update_from_distributed(call: ControlCaller, given: DistributedParameters) -> Outcome:
    fields = {
        "names": given.names,
        "dtype_names": given.dtypes,
        "shapes": given.shapes,
        "group_name": given.group_name,
        "packed": False,
    }
    update = UpdateWeights(update_info=pack(fields, name="update_info"), weight_version=given.weight_version)
    await _abort_requests(call, given)
    info = await call(GetWeightInfo())
    is_open = info["state"] == "updating"
    if not is_open:
        await call(StartWeightUpdate())
    answer = await call(update)
    if is_open or info["is_paused"]:
        return Outcome(message=f"{answer['num_tensors']} tensors have come; they are applied at the end of the update.")
    finished = await call(FinishWeightUpdate())
    return Outcome(message=f"The weights have version {finished['weight_version']}.")


async def update_from_disk(call: ControlCaller, given: DiskParameters) -> DiskOutcome:
    await _abort_requests(call, given)
    request = update_request({"weight_dir": given.model_path, "weight_version": given.weight_version})
    answer = await call(request)
    return DiskOutcome(message=f"The weights have version {answer['weight_version']}.")


async def refuse_tensors(call: ControlCaller, given: TensorParameters) -> Outcome:
    raise InvalidRequest(
        "tensors that are serialized by pickle are refused, because a pickle can run any code: send the weights with "
        "/update_weights_from_distributed or /update_weights_from_disk, or on one node with /update_weights and "
        "backend `shm`",
        param="serialized_named_tensors",
    )


async def refuse_check(call: ControlCaller, given: WeightsCheckerParameters) -> Outcome:
    raise InvalidRequest(
        f"the action {given.action[:40]!r} is not supported, because no snapshots of weights are kept: /weight_checker "
        "returns checksums, and compares others with them",
        param="action",
    )


async def begin(call: ControlCaller, given: ControlParameters) -> Outcome:
    answer = await call(StartWeightUpdate())
    return Outcome(message=f"Weight update {answer['update']} is open.")


async def end(call: ControlCaller, given: ControlParameters) -> Outcome:
    answer = await call(FinishWeightUpdate())
    return Outcome(message=f"The weights have version {answer['weight_version']}.")


async def get_version(call: ControlCaller, given: ControlParameters) -> VersionOutcome:
    info = await call(GetWeightInfo())
    return VersionOutcome(info["weight_version"])


async def _abort_requests(call: ControlCaller, given: UpdateDetails) -> None:
    if given.abort_all_requests:
        await call(AbortRequests())
