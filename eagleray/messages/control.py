"""Messages by which an instance is steered: paused, put to sleep, given new weights.

A client sends a `ControlCall` to the supervisor, which executes one call at a time. It sends `Command`s to the engines,
or to the clients if they hold what the call is about, and each replies with one `CommandDone`. When all living members
have replied, the caller receives `ControlReturned`. A member that exits needs no longer reply: its successor receives
the state of the instance in `Attach`, and starts in that state.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from eagleray.identity import ClientId, EngineId, MemberId
from eagleray.messages.failure import Failure

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of the requests that run when an instance is paused: they are aborted and deliver what they have; the pause
begins when they have finished; or they stay where they are and continue after the pause."""

SleepTag = Literal["weights", "kv_cache", "scheduling"]
"""Part of an engine that can sleep: the memory of the weights, that of the cache, or only the steps."""


class InstanceState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that all members of an instance share. A member that joins adopts it before it is ready."""

    pause: PauseMode | None = None
    """Mode of the pause; None if the instance is not paused."""
    asleep: tuple[SleepTag, ...] = ()
    """Parts that sleep."""
    sleep_level: int = 0
    """Level of the sleep: 2 if the weights were dropped."""
    open_update: int | None = None
    """Number of the weight update that is open; None if there is none."""
    is_in_place: bool = False
    """Whether the open update overwrites the weights before it is finished, so that no steps may run."""
    update: int = 0
    """Number of the last weight update that was committed; 0 for the weights of the checkpoint."""
    weight_version: str = "default"
    """The trainer's name for these weights."""

    @property
    def name(self) -> Literal["updating", "sleeping", "paused", "serving"]:
        """Name of the state for users."""
        if self.open_update is not None:
            return "updating"
        return "sleeping" if self.asleep else "paused" if self.pause is not None else "serving"

    @property
    def may_step(self) -> bool:
        """Whether engines may run steps of requests. In a pause of mode `wait` they do until those that run end."""
        return self.pause is None and not self.asleep and not (self.open_update is not None and self.is_in_place)


# Calls of users.


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Whether the prefix cache is emptied; without effect in mode `keep`."""


class Resume(msgspec.Struct, frozen=True, tag=True):
    """End a pause."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    tags: tuple[SleepTag, ...]
    level: int
    """1: weights can be woken without a source; 2: they are dropped; 0: only the steps stop."""
    mode: PauseMode = "abort"
    """Treatment of the requests that run."""


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    tags: tuple[SleepTag, ...] = ("weights", "kv_cache", "scheduling")


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reset_running_requests: bool = False
    """Whether running requests give up their blocks too, and are computed again."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    request_ids: list[str] | None = None
    """Ids as users know them; None: all."""


class InitWeightTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    init_info: dict[str, Any]
    """Fields of the backend, see `eagleray.weights`."""


class ShutdownWeightTransfer(msgspec.Struct, frozen=True, tag=True):
    """Leave the trainer's group."""


class StartWeightUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    num_bytes: int | None = None
    """Bytes that will come, if known."""


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive tensors, all that the checkpoint in `weight_dir` has or those that `update_info` describes."""

    update_info: bytes = b""
    """A dict, or a list of one for each worker of the instance, encoded by `plain.pack`; empty with `weight_dir`."""
    weight_dir: str | None = None
    """Directory of a checkpoint: the update is started, read and finished in this one call."""
    weight_version: str | None = None


class FinishWeightUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    weight_version: str | None = None
    """Name of the new weights; None: the number of the update."""
    require_complete: bool = False
    """Whether every weight must have come."""


class AbortWeightUpdate(msgspec.Struct, frozen=True, tag=True):
    """Drop what has come; the weights from before stay."""


class SetWeightVersion(msgspec.Struct, frozen=True, tag=True):
    new_version: str


class GetWeightInfo(msgspec.Struct, frozen=True, tag=True):
    """Report the state, the versions and the engines."""


ControlRequest = (
    Pause
    | Resume
    | Sleep
    | WakeUp
    | ResetPrefixCache
    | AbortRequests
    | InitWeightTransfer
    | ShutdownWeightTransfer
    | StartWeightUpdate
    | UpdateWeights
    | FinishWeightUpdate
    | AbortWeightUpdate
    | SetWeightVersion
    | GetWeightInfo
)


class ControlCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a user. Calls with the same `operation_id` are one: a repetition gets the outcome of the first."""

    client: ClientId
    call_id: int
    """Number, unique among the calls of its client."""
    operation_id: str
    """The user's `X-Request-Id`, or a random one."""
    request: ControlRequest
    timeout: float
    """Time limit in seconds for all members together."""


class ControlReturned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a `ControlCall`."""

    call_id: int
    answer: bytes = b""
    """A dict, encoded by `plain.pack`; empty with a failure."""
    failure: Failure | None = None


# Commands to members.


class SetState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Adopt this state. An engine replies when the state holds on all of its workers: with `abort` when the requests
    have ended, with `wait` when none runs any longer, after sleep when memory is free, after waking when steps may run.
    A committed update (`state.update` grows) is applied between two steps."""

    state: InstanceState
    clear_cache: bool = False
    abort_running: bool = False


class OpenWeightTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    init_info: dict[str, Any]
    first_rank: int
    """Rank of the engine's first worker among the workers of the instance."""


class CloseWeightTransfer(msgspec.Struct, frozen=True, tag=True):
    """Leave the trainer's group."""


class ReceiveWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive tensors of the open update and stage them. The reply names their number and bytes."""

    update_info: bytes
    """See `UpdateWeights`; a list has this engine's workers only."""
    weight_dir: str | None = None


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that everything that has come can be applied. The reply names what is missing."""

    require_complete: bool


EngineCommand = (
    SetState
    | ResetPrefixCache
    | AbortRequests
    | OpenWeightTransfer
    | CloseWeightTransfer
    | ReceiveWeights
    | CheckWeights
    | AbortWeightUpdate
)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command of the supervisor to a member, which executes commands in their order."""

    number: int
    """Number of the command in this instance."""
    body: EngineCommand
    timeout: float
    """Seconds within which the member must reply."""


class CommandDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a `Command`."""

    member: MemberId
    number: int
    result: dict[str, Any] = {}
    """For `SetState`: `num_kept`, `num_aborted`, `freed_bytes`. For `ReceiveWeights`: `num_tensors`, `num_bytes`. For
    `CheckWeights`: `missing`, a list of names, and `num_missing`. For `ResetPrefixCache`: `success`. For
    `AbortRequests`: `aborted`, a number."""
    failure: Failure | None = None


class EngineWeights(msgspec.Struct, frozen=True, kw_only=True):
    """Weights of one engine, for `GetWeightInfo`."""

    engine: EngineId
    update: int
    state: Literal["ready", "starting", "waiting", "torn"]
    """`waiting`: it needs weights that no source has; `torn`: an update in place was broken off."""
