"""The operations on low-rank adapters, see `operations`.

Every engine loads an adapter before requests may name it. If one engine cannot, the others drop it, and nothing has
changed. Engines that start later load the adapters that the state of the instance lists.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from eagleray.errors import EnginesMissing, InvalidRequest, NotFound
from eagleray.fleet.control.instance import SteeredInstance
from eagleray.fleet.control.operations import Adoption, Commands, Steps
from eagleray.identity import MemberId
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import CommandBody, DropAdapter, LoadAdapter, SetState, StageAdapter, UnloadAdapter


def load_adapter(instance: SteeredInstance, request: LoadAdapter) -> Steps:
    """Load an adapter on all engines, then let requests name it."""
    _check_load(instance, request)
    adapter = Adapter(name=request.name, number=instance.next_adapter_number(), path=request.path)
    digests = set[str]()
    try:
        replies = yield Commands({record.engine: StageAdapter(adapter) for record in instance.started})
        replies.raise_failure()
        if not replies.results:
            raise EnginesMissing(f"adapter {request.name!r} was not loaded: {instance.describe_missing()}")
        found = {str(result["digest"]) for result in replies.results.values()}
        if len(found) > 1:
            raise InvalidRequest(
                f"{request.path}: the engines read different files there; give every node the same ones",
                param="lora_path",
            )
        digests = found
    finally:
        if not digests:
            instance.post(DropAdapter(adapter.number))
    others = [other for other in instance.state.adapters if other.name != request.name]
    yield from _set_adapters(instance, [*others, replace(adapter, digest=digests.pop())])
    return {"status": "ok", "lora_name": adapter.name, "number": adapter.number}


def unload_adapter(instance: SteeredInstance, request: UnloadAdapter) -> Steps:
    """Remove an adapter, so that no further request may name it."""
    kept = [adapter for adapter in instance.state.adapters if adapter.name != request.name]
    if len(kept) == len(instance.state.adapters):
        loaded = ", ".join(adapter.name for adapter in kept) or "none"
        raise NotFound(f"there is no adapter {request.name!r}; loaded: {loaded}")
    yield from _set_adapters(instance, kept)
    return {"status": "ok", "lora_name": request.name}


def _check_load(instance: SteeredInstance, request: LoadAdapter) -> None:
    adapters = {adapter.name: adapter for adapter in instance.state.adapters}
    if not instance.max_adapters:
        raise InvalidRequest("adapters are not served here: start with the option `enable_lora`", param="lora_name")
    if not request.name or not request.path:
        raise InvalidRequest("an adapter needs a name and a directory", param="lora_name")
    if request.name in instance.model_names:
        raise InvalidRequest(f"{request.name!r} is the name of the model; take another", param="lora_name")
    if request.name in adapters:
        if not request.load_inplace:
            raise InvalidRequest(
                f"adapter {request.name!r} is loaded already, from {adapters[request.name].path}: set "
                "`load_inplace` to replace it, or unload it first",
                param="lora_name",
            )
    elif len(adapters) >= instance.max_adapters:
        raise InvalidRequest(
            f"{len(adapters)} adapters are loaded, as many as option `max_loras` allows: unload one first",
            param="lora_name",
        )


def _set_adapters(instance: SteeredInstance, adapters: Sequence[Adapter]) -> Adoption:
    """Have engines and clients adopt the adapters, and wait until they have."""
    instance.assign(instance.changed(adapters=tuple(adapters)))
    bodies: dict[MemberId, CommandBody] = dict.fromkeys(instance.clients, SetState(state=instance.state))
    replies = yield Commands(bodies | instance.set_state_bodies())
    replies.raise_failure()
    return replies
