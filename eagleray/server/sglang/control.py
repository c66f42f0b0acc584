"""Control routes with SGLang's names: pauses, aborts, the prefix cache and memory."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from eagleray.client.control_requests import wake_up_request
from eagleray.errors import InvalidRequest, WrongState
from eagleray.messages.control import (
    AbortRequests,
    FinishWeightUpdate,
    GetWeightInfo,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    SleepTag,
)
from eagleray.server.endpoint import Endpoint
from eagleray.server.parameters import ControlParameters
from eagleray.server.service import Service
from eagleray.server.sglang.answers import ControlCaller, Outcome, sglang_endpoint

MemoryTag = Literal["weights", "kv_cache", "cuda_graph"]

SLEEP_TAGS: tuple[SleepTag, ...] = ("weights", "kv_cache")


class PauseGenerationParameters(ControlParameters, kw_only=True):
    mode: Annotated[
        Literal["abort", "in_place", "retract"],
        Meta(
            description="Running requests end with the tokens so far (abort), continue after the pause (in_place), or "
            "give up their cache and are computed again after it (retract)."
        ),
    ] = "abort"


class ContinueGenerationParameters(ControlParameters, kw_only=True):
    torch_empty_cache: Annotated[bool, Meta(description="No effect.")] = True


class AbortRequestParameters(ControlParameters, kw_only=True):
    rid: Annotated[str | None, Meta(description="Id of a request.")] = None
    abort_all: bool = False
    abort_message: Annotated[str | None, Meta(description="No effect.")] = None


class MemoryParameters(ControlParameters, kw_only=True):
    tags: Annotated[
        list[MemoryTag] | None, Meta(description="Default: all. The graphs of cuda_graph stay in memory.")
    ] = None


class AbortOutcome(Outcome, frozen=True, kw_only=True):
    aborted: int


def sglang_control_endpoints(service: Service) -> list[Endpoint]:
    return [
        sglang_endpoint("/pause_generation", service, PauseGenerationParameters, pause, "Stop generating."),
        sglang_endpoint(
            "/continue_generation",
            service,
            ContinueGenerationParameters,
            resume,
            "Commit the weights that came during a pause, and end it.",
        ),
        sglang_endpoint(
            "/abort_request",
            service,
            AbortRequestParameters,
            abort,
            "End requests, which deliver the tokens so far.",
            response=AbortOutcome,
        ),
        sglang_endpoint(
            "/flush_cache",
            service,
            ControlParameters,
            flush,
            "Empty the prefix cache, unless requests have a part of it.",
            methods=("get", "post"),
        ),
        sglang_endpoint(
            "/release_memory_occupation",
            service,
            MemoryParameters,
            release,
            "Return memory to the system, and stop generating.",
        ),
        sglang_endpoint(
            "/resume_memory_occupation", service, MemoryParameters, occupy, "Take the memory, or a part of it, again."
        ),
    ]


async def pause(call: ControlCaller, given: PauseGenerationParameters) -> Outcome:
    if given.mode == "abort":
        await call(Pause(mode="abort"))
    else:
        await call(Pause(mode="keep", clear_cache=False))
    if given.mode == "retract":
        await call(ResetPrefixCache(reset_running_requests=True))
    return Outcome(message=f"Generation is paused ({given.mode}).")


async def resume(call: ControlCaller, given: ContinueGenerationParameters) -> Outcome:
    """Commit the update of the pause, and end the pause.

    Raises `WrongState` if the update was dropped, so that the trainer does not take old weights for new ones.
    """
    info = await call(GetWeightInfo())
    if info["state"] == "updating":
        await call(FinishWeightUpdate())
    elif info["dropped"]:
        raise WrongState(
            f"the weights that came during this pause are lost: {info['dropped']}. Send them again, or call /resume to "
            "generate with the weights from before"
        )
    await call(Resume(may_sleep=True))  # the cache may sleep while weights are pushed
    return Outcome(message="Generation continues.")


async def abort(call: ControlCaller, given: AbortRequestParameters) -> Outcome:
    if given.rid is None and not given.abort_all:
        raise InvalidRequest("give the `rid` of a request, or `abort_all`", param="rid")
    answer = await call(AbortRequests(request_ids=None if given.abort_all or given.rid is None else [given.rid]))
    return AbortOutcome(message="Aborted.", aborted=answer["aborted"])


async def flush(call: ControlCaller, given: ControlParameters) -> Outcome:
    answer = await call(ResetPrefixCache())
    if not answer["success"]:
        raise InvalidRequest("the cache was not emptied, because requests have a part of it: pause with mode abort")
    return Outcome(message="The cache is empty.")


async def release(call: ControlCaller, given: MemoryParameters) -> Outcome:
    if tags := _sleep_tags(given.tags):
        await call(Sleep(tags=tags, level=1, mode="keep"))
    return Outcome(message="Memory is released.")


async def occupy(call: ControlCaller, given: MemoryParameters) -> Outcome:
    if given.tags is None:
        await call(wake_up_request(None))
    elif tags := _sleep_tags(given.tags):
        await call(wake_up_request(tags))
    return Outcome(message="Memory is occupied.")


def _sleep_tags(tags: list[MemoryTag] | None) -> tuple[SleepTag, ...]:
    return tuple(tag for tag in SLEEP_TAGS if tags is None or tag in tags)
