"""Messages by which an instance is steered: paused, put to sleep, given new weights.

A client sends a `ControlCall` to the supervisor, which executes one call at a time. The supervisor sends `Command`s to
the engines, or to the clients for a call about requests, and each replies with one `CommandDone`. When all living
members have replied, the caller receives `ControlReturned`. No reply is awaited from a member that exits: its successor
receives the state of the instance in `Attach`, and starts in that state. `StateChanged` publishes the state to the
clients.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from eagleray.identity import FIRST_WEIGHT_VERSION, ClientId, MemberId
from eagleray.messages.adapters import Adapter
from eagleray.messages.failure import Failure
from eagleray.messages.scaling import FleetRequest

PauseMode = Literal["abort", "wait", "keep"]
"""Treatment of the running requests when an instance is paused. `abort`: they are aborted, and deliver the tokens so
far. `wait`: the pause begins when they have finished. `keep`: they continue after the pause."""

SleepTag = Literal["weights", "kv_cache", "scheduling"]
"""Part of an engine that can sleep: the memory of the weights, the memory of the cache, or only the scheduling of
steps."""

StateName = Literal["updating", "sleeping", "paused", "serving"]


class InstanceState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State that all members of an instance share. A member that joins adopts it before it is ready."""

    pause: PauseMode | None = None
    """Mode of the pause; None if the instance is not paused."""
    asleep: tuple[SleepTag, ...] = ()
    """Parts that sleep."""
    sleep_level: int = 0
    """Level of the sleep: 2 if the weights were dropped."""
    open_update: int | None = None
    """Number of the open weight update; None if no update is open."""
    is_in_place: bool = False
    """Whether the open update overwrites the weights before its commit, so that no steps may run."""
    update: int = 0
    """Number of the last weight update that was committed; 0 for the weights of the checkpoint."""
    weight_version: str = FIRST_WEIGHT_VERSION
    """The trainer's name for these weights."""
    adapters: tuple[Adapter, ...] = ()
    """Low-rank adapters that requests may name, each name once."""
    is_held: bool = False
    """Whether no steps may run for a moment, because engines that share experts are changing their memory together."""
    lacks_weights: bool = False
    """Whether no steps may run, because no engine has weights, or because one of the engines that share experts has
    other weights or is missing."""

    @property
    def name(self) -> StateName:
        """Name of the state for users."""
        if self.open_update is not None:
            return "updating"
        return "sleeping" if self.asleep else "paused" if self.pause is not None else "serving"

    @property
    def may_step(self) -> bool:
        """Whether engines may run steps. In a pause of mode `wait`, they still run those of the running requests."""
        is_overwritten = self.open_update is not None and self.is_in_place
        is_stopped = self.is_held or self.lacks_weights or is_overwritten
        return self.pause is None and not self.asleep and not is_stopped


# Calls of users.


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run no steps until `Resume`."""

    mode: PauseMode = "abort"
    clear_cache: bool = True
    """Whether the prefix cache is emptied; without effect in mode `keep`."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End a pause. A `Pause` that is still being executed fails for its caller."""

    may_sleep: bool = False
    """Whether the call is allowed while parts sleep, which then stay asleep."""


class Sleep(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Return the memory of these parts to the system, and run no steps until `WakeUp`."""

    tags: tuple[SleepTag, ...]
    level: int
    """0: only the steps stop. 1: the weights can be restored without a source. 2: the weights are dropped."""
    mode: PauseMode = "abort"
    """Treatment of the running requests."""


class WakeUp(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End the sleep of these parts."""

    tags: tuple[SleepTag, ...] = ("weights", "kv_cache", "scheduling")


class ResetPrefixCache(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Empty the prefix cache."""

    reset_running_requests: bool = False
    """Whether running requests give up their blocks too, and are computed again."""


class AbortRequests(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Abort requests, which deliver the tokens so far. Every client executes the command for the requests it has."""

    request_ids: list[str] | None = None
    """Ids as users know them; None: all requests."""


class InitWeightTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prepare the transfer of weights from a trainer, once all engines have started. An earlier transfer is closed."""

    init_info: dict[str, Any]
    """Fields of the backend, see `eagleray.weights`."""


class ShutdownWeightTransfer(msgspec.Struct, frozen=True, tag=True):
    """Leave the trainer's group."""


class StartWeightUpdate(msgspec.Struct, frozen=True, tag=True):
    """Open an update."""


class UpdateWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive tensors: all of the checkpoint in `weight_dir`, or the ones that `update_info` describes."""

    update_info: bytes = b""
    """A dict, or a list with a dict for each worker of the instance, encoded by `plain.pack`; empty with
    `weight_dir`."""
    weight_dir: str | None = None
    """Directory of a checkpoint: the update is started, read and finished in this one call."""
    weight_version: str | None = None
    """Name of the new weights, unless `FinishWeightUpdate` gives another."""


class FinishWeightUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Commit the open update."""

    weight_version: str | None = None
    """Name of the new weights; None: the number of the update."""
    require_complete: bool = False
    """Whether the update must contain every weight."""


class AbortWeightUpdate(msgspec.Struct, frozen=True, tag=True):
    """Drop the open update with its tensors; the old weights stay."""


class SetWeightVersion(msgspec.Struct, frozen=True, tag=True):
    """Change the name of the weights."""

    new_version: str


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Load a low-rank adapter on all engines. If it does not fit, nothing changes anywhere."""

    name: str
    path: str
    """Directory with the adapter in PEFT's format, readable by every worker."""
    load_inplace: bool = False
    """Whether to replace an adapter of the same name. Running requests keep the adapter that they began with."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag=True):
    """Unload a low-rank adapter. Running requests keep it until they finish."""

    name: str


class GetWeightInfo(msgspec.Struct, frozen=True, tag=True):
    """Report the state, the versions, the engines and the current call. Answered at once."""


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
    | LoadAdapter
    | UnloadAdapter
    | GetWeightInfo
)


class ControlCall(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a user. A call with the `operation_id` of an earlier one repeats it and gets the same outcome."""

    client: ClientId
    call_id: int
    """Number, unique among the calls of its client."""
    operation_id: str
    """The user's `X-Request-Id`, or a random one."""
    request: ControlRequest | FleetRequest
    timeout: float
    """Time limit of the call, in seconds, for all members together."""


class ControlReturned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a `ControlCall`."""

    call_id: int
    answer: bytes = b""
    """A dict, encoded by `plain.pack`; empty with a failure."""
    failure: Failure | None = None


# Commands to members.


class SetState(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Adopt this state. An engine replies when the state holds on all of its workers: in a pause of mode `abort` when
    the requests have been aborted, in mode `wait` when the running ones have finished, after sleep when memory is free,
    after waking when steps may run.

    A later `SetState` ends the wait of an earlier one, which is then answered at once. An update begins when
    `state.open_update` is set. It is committed when `state.update` is its number: the engine applies the staged
    tensors between two steps. An engine without staged tensors of that number keeps its weights and reports their
    number. If an update is closed without a commit, `AbortWeightUpdate` precedes the new state.
    """

    state: InstanceState
    clear_cache: bool = False
    """Whether the prefix cache is emptied."""
    abort_running: bool = False
    """Whether the requests of the engine, running or waiting, are aborted."""


class OpenWeightTransfer(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Prepare the transfer of weights, see `InitWeightTransfer`."""

    init_info: dict[str, Any]
    first_rank: int
    """Rank of the engine's first worker among the workers of the instance."""


class CloseWeightTransfer(msgspec.Struct, frozen=True, tag=True):
    """Leave the trainer's group."""


class ReceiveWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive tensors of the open update and stage them. The reply has their number and size."""

    update_info: bytes
    """See `UpdateWeights`; a list has a dict for each worker of this engine only."""
    weight_dir: str | None = None


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Check that the received tensors can be applied. The reply names the missing weights."""

    require_complete: bool


class ServeWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Offer the weights of this update to another engine, once. The reply has `handles`, one for each worker."""

    update: int


class FetchWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Get the weights of a committed update from an engine or a directory. No steps run meanwhile. The reply has
    `update`, like the reply to `SetState`."""

    update: int
    handles: list[bytes] = []
    """Reply of an engine to `ServeWeights`."""
    weight_dir: str | None = None
    """Directory of the weights; None if they come from an engine."""
    fingerprint: str = ""
    """Fingerprint that the files of the directory must have; empty if any will do."""


class StageAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter into a slot, before requests may name it. The reply has the `digest` of its files."""

    adapter: Adapter


class DropAdapter(msgspec.Struct, frozen=True, tag=True):
    """Free the slot of an adapter that another engine could not load."""

    number: int


CommandBody = (
    SetState
    | ResetPrefixCache
    | AbortRequests
    | OpenWeightTransfer
    | CloseWeightTransfer
    | ReceiveWeights
    | CheckWeights
    | AbortWeightUpdate
    | ServeWeights
    | FetchWeights
    | StageAdapter
    | DropAdapter
)


class Command(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A command of the supervisor to a member, which executes commands in their order."""

    number: int
    """Number, unique among the commands of this instance."""
    body: CommandBody
    timeout: float
    """Seconds within which the member must reply."""


class CommandDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a `Command`."""

    member: MemberId
    number: int
    result: dict[str, Any] = {}
    """For `SetState`: `num_kept`, `num_aborted`, `freed_bytes`, and `update`, the number of the update whose weights
    the engine has, or None if its weights are empty; absent keys mean 0, and the number that the engine had. For
    `OpenWeightTransfer`: `is_collective`, whether the exit of an engine breaks the transfer (absent: True). For
    `ReceiveWeights`: `num_tensors`, `num_bytes`, and with a directory its `fingerprint`. For `CheckWeights`: `missing`,
    a list of names, and `num_missing`. For `ResetPrefixCache`: `success`. For `AbortRequests`: `aborted`, a number."""
    failure: Failure | None = None


class StateChanged(msgspec.Struct, frozen=True, tag=True):
    """The instance is in this state now."""

    state: InstanceState
