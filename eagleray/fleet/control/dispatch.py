"""The generator that executes each call. Pure."""

from __future__ import annotations

from eagleray.fleet.control import adapters, operations
from eagleray.fleet.control.instance import SteeredInstance
from eagleray.fleet.control.operations import Steps
from eagleray.fleet.control.weight_update import WeightUpdates
from eagleray.messages.control import (
    AbortRequests,
    AbortWeightUpdate,
    ControlRequest,
    FinishWeightUpdate,
    GetWeightInfo,
    InitWeightTransfer,
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


def steps_of(request: ControlRequest, instance: SteeredInstance, updates: WeightUpdates) -> Steps:
    """Return the generator of a call."""
    match request:
        case Pause():
            return operations.pause(instance, request)
        case Resume():
            return operations.resume(instance)
        case Sleep():
            return operations.sleep(instance, request)
        case WakeUp():
            return operations.wake_up(instance, request)
        case ResetPrefixCache():
            return operations.reset_prefix_cache(instance, request)
        case AbortRequests():
            return operations.abort_requests(instance, request)
        case SetWeightVersion():
            return operations.set_weight_version(instance, request)
        case InitWeightTransfer():
            return updates.init(request)
        case ShutdownWeightTransfer():
            return updates.shutdown()
        case StartWeightUpdate():
            return updates.start()
        case UpdateWeights():
            return updates.update(request)
        case FinishWeightUpdate():
            return updates.finish(request)
        case AbortWeightUpdate():
            return updates.abort()
        case LoadAdapter():
            return adapters.load_adapter(instance, request)
        case UnloadAdapter():
            return adapters.unload_adapter(instance, request)
        case GetWeightInfo():
            raise AssertionError("GetWeightInfo is answered at once")
