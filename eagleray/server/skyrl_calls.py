"""Methods that SkyRL's client calls through /collective_rpc, as control calls of the instance.

SkyRL has a worker extension with these methods. Here an update belongs to the whole instance, so that all engines
commit it together and an engine that is replaced gets it too. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagleray.client.control_requests import sleep_request, start_request, update_request, wake_up_request
from eagleray.errors import InvalidRequest
from eagleray.messages.control import ControlRequest, FinishWeightUpdate


def skyrl_request(method: str, kwargs: Mapping[str, Any]) -> ControlRequest | None:
    """Return the control call for a method of SkyRL, or None for another method. Raises `InvalidRequest` for wrong
    arguments."""
    make = CALLS.get(method)
    if make is None:
        return None
    try:
        return make(**kwargs)
    except TypeError:
        given = ", ".join(kwargs) or "none"
        raise InvalidRequest(
            f"`{method}` has other arguments than the given ones, {given}: send what SkyRL's client sends",
            param="kwargs",
        ) from None


def _start(is_checkpoint_format: bool = True) -> ControlRequest:
    return start_request(is_checkpoint_format)


def _update(update_info: dict[str, Any]) -> ControlRequest:
    return update_request({"update_info": update_info})


def _finish() -> ControlRequest:
    return FinishWeightUpdate()


def _sleep(offload_kv: bool = True) -> ControlRequest:
    """Drop weights and cache. There is no copy of the cache: `offload_kv` or not, kept requests are computed again."""
    return sleep_request(2, "keep")


def _wake(tags: list[str] | None = None) -> ControlRequest:
    return wake_up_request(tags)


CALLS: dict[str, Callable[..., ControlRequest]] = {
    "skyrl_start_weight_update": _start,
    "update_weights_nccl": _update,
    "update_weights_ipc": _update,
    "skyrl_finish_weight_update": _finish,
    "skyrl_sleep_for_weight_sync": _sleep,
    "skyrl_wake_for_weight_sync": _wake,
}
"""Control call by method."""
