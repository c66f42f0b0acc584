"""The calls that each state allows. Pure."""

from __future__ import annotations

from eagleray.errors import WrongState
from eagleray.fleet.control.instance import SteeredInstance
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    ControlRequest,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
    InstanceState,
    LoadAdapter,
    Pause,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    ShutdownWeightTransfer,
    Sleep,
    StartWeightUpdate,
    UnloadAdapter,
    UpdateWeights,
    WakeUp,
)

NAMES: dict[type[ControlRequest], str] = {
    Pause: "pause",
    Resume: "resume",
    Sleep: "sleep",
    WakeUp: "wake_up",
    ResetPrefixCache: "reset_prefix_cache",
    AbortRequests: "abort_requests",
    InitWeightTransfer: "init_weight_transfer_engine",
    ShutdownWeightTransfer: "shutdown_weight_transfer_engine",
    StartWeightUpdate: "start_weight_update",
    UpdateWeights: "update_weights",
    FinishWeightUpdate: "finish_weight_update",
    AbortWeightUpdate: "abort_weight_update",
    SetWeightVersion: "update_weight_version",
    LoadAdapter: "load_lora_adapter",
    UnloadAdapter: "unload_lora_adapter",
    GetWeightInfo: "weight_info",
}
"""Names of the calls for users."""


def check_state(
    request: ControlRequest, instance: SteeredInstance, *, has_received: bool, repeats_commit: bool
) -> None:
    """Raise `WrongState` if the state forbids the call.

    `has_received`: whether tensors of the open update have been received. `repeats_commit`: whether a finish without an
    open update repeats the last commit.
    """
    state = instance.state
    begins_update = isinstance(request, StartWeightUpdate | InitWeightTransfer | SetWeightVersion) or (
        isinstance(request, UpdateWeights) and request.weight_dir is not None
    )
    if begins_update and instance.weights_kept_because is not None:
        raise WrongState(f"{NAMES[type(request)]} is not possible now: {instance.weights_kept_because}")
    is_updating, weights_sleep = state.open_update is not None, "weights" in state.asleep
    match request:
        case Resume():
            forbidden = not may_resume(request, state)
        case Sleep() | InitWeightTransfer() | ShutdownWeightTransfer() | SetWeightVersion():
            forbidden = is_updating
        case WakeUp(tags=tags):
            forbidden = is_updating and set(tags) != {"kv_cache"}
        case StartWeightUpdate():
            forbidden = has_received if is_updating else weights_sleep
        case UpdateWeights(weight_dir=str()) | LoadAdapter() | UnloadAdapter():
            forbidden = is_updating or weights_sleep
        case UpdateWeights():
            forbidden = not is_updating
        case FinishWeightUpdate():
            forbidden = not is_updating and not repeats_commit
        case _:
            forbidden = False
    if forbidden:
        raise WrongState(f"{NAMES[type(request)]} is not possible now: {_obstacle(instance)}")


def may_resume(request: Resume, state: InstanceState) -> bool:
    """Whether the state allows a pause to end."""
    return state.open_update is None and (request.may_sleep or not state.asleep)


def _obstacle(instance: SteeredInstance) -> str:
    """Describe the latch that forbids the call, with its age and the call that ends it."""
    state, now, since = instance.state, instance.now, instance.since
    if state.open_update is not None:
        return (
            f"weight update {state.open_update} has been open for {now - since['update']:.0f} s: call "
            "finish_weight_update or abort_weight_update first"
        )
    if state.asleep:
        return f"{', '.join(state.asleep)} have slept for {now - since['sleep']:.0f} s: call wake_up first"
    return "no weight update is open: call start_weight_update first"
