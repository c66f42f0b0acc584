"""The operations on an instance that transfer no weights, as generators.

A generator yields commands, or a condition to wait for, and receives the replies. It returns the answer of the call, or
raises its error. It changes the state at once, so that an engine that starts meanwhile adopts the new state. If an
engine cannot adopt it, the former state is restored everywhere. After an error is thrown into a generator (the deadline
has passed, or another call ends this one), it yields nothing more. Driven by `Control`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from eagleray.fleet.control.instance import MemberFailed, SteeredInstance
from eagleray.identity import EngineId, MemberId
from eagleray.messages.control import (
    AbortRequests,
    CommandBody,
    Pause,
    ResetPrefixCache,
    SetWeightVersion,
    Sleep,
    SleepTag,
    WakeUp,
)
from eagleray.messages.failure import Failure

Answer = dict[str, Any]


@dataclass
class Replies:
    """Replies to the commands of one operation that were sent together."""

    results: dict[MemberId, dict[str, Any]] = field(default_factory=dict)
    failures: dict[MemberId, Failure] = field(default_factory=dict)
    exits: dict[MemberId, str] = field(default_factory=dict)
    """Causes of the exits of members that had not replied."""

    def total(self, key: str) -> int:
        """Return the sum of a number over all results."""
        return sum(int(result.get(key, 0)) for result in self.results.values())

    def most(self, key: str) -> int:
        """Return the largest value of a number in the results."""
        return max((int(result.get(key, 0)) for result in self.results.values()), default=0)

    def raise_failure(self) -> None:
        """Raise `MemberFailed` if a member failed, for the first failure."""
        for member, failure in self.failures.items():
            raise MemberFailed(failure if failure.is_user_error else _named(member, failure))


def _named(member: MemberId, failure: Failure) -> Failure:
    """Return the failure with the member's name in its message."""
    return replace(failure, message=f"{member.label}: {failure.message}")


@dataclass
class Commands:
    """Commands to send, whose replies are awaited. With `fails_fast`, the first failure ends the wait."""

    bodies: dict[MemberId, CommandBody]
    fails_fast: bool = False


@dataclass
class Condition:
    """A condition to wait for: `holds` returns whether it holds, `reason` describes why it does not."""

    holds: Callable[[], bool]
    reason: Callable[[], str]


Steps = Generator[Commands | Condition, Replies, Answer]
Adoption = Generator[Commands | Condition, Replies, Replies]


def adopt(instance: SteeredInstance, changes: dict[str, Any], **fields: Any) -> Adoption:
    """Change fields of the state, and wait until the engines have adopted it. `fields`: further fields of `SetState`.

    An engine may reply early because a later state came, for example after an exit. That state must be adopted too.
    Restores the former state and raises `MemberFailed` if an engine cannot adopt the new one.
    """
    former = {name: getattr(instance.state, name) for name in changes}
    instance.assign(instance.changed(**changes))
    replies = yield Commands(instance.set_state_bodies(**fields))
    if replies.failures:
        instance.assign(instance.changed(**former))
        instance.post_state()
        replies.raise_failure()
    yield Condition(lambda: not _unanswered(instance), lambda: f"{_unanswered(instance)} must adopt a later state")
    return replies


def _unanswered(instance: SteeredInstance) -> str:
    """Return the labels of the engines that have not replied to the newest state."""
    return ", ".join(record.engine.label for record in instance.steered if record.unanswered)


def pause(instance: SteeredInstance, request: Pause) -> Steps:
    """Latch the pause. The call returns when no step runs and aborted requests have delivered their output."""
    replies = yield from adopt(
        instance,
        {"pause": request.mode},
        clear_cache=request.clear_cache and request.mode != "keep",
        abort_running=request.mode == "abort",
    )
    return {"status": "paused", "num_kept": replies.total("num_kept"), "num_aborted": replies.total("num_aborted")}


def resume(instance: SteeredInstance) -> Steps:
    """Release the pause."""
    yield from adopt(instance, {"pause": None})
    return {"status": "resumed"}


def sleep(instance: SteeredInstance, request: Sleep) -> Steps:
    """Put parts to sleep. Parts that sleep already stay asleep."""
    if request.mode == "wait":
        yield from _wait_for_requests(instance)
    former = instance.state
    tags = tuple(dict.fromkeys((*former.asleep, *request.tags)))
    level = max(former.sleep_level, request.level)
    with _released_afterwards(instance):
        if instance.shares_experts and instance.state.may_step:
            yield from adopt(instance, {"is_held": True})
        changes = {"asleep": tags, "sleep_level": level, "is_held": False}
        replies = yield from adopt(instance, changes, abort_running=request.mode == "abort")
    return {"status": "sleeping", "level": level, "freed_bytes": replies.total("freed_bytes")}


def _wait_for_requests(instance: SteeredInstance) -> Adoption:
    """Wait until no request runs, in a pause that this function ends. The caller sends the next state."""
    former = instance.state.pause
    try:
        return (yield from adopt(instance, {"pause": "wait"}))
    except Exception:
        instance.assign(instance.changed(pause=former))
        instance.post_state()
        raise
    finally:
        instance.assign(instance.changed(pause=former))


@contextmanager
def _released_afterwards(instance: SteeredInstance) -> Iterator[None]:
    """Release held engines afterwards. Engines that share experts step together, so all are held while one of them
    changes its memory."""
    try:
        yield
    finally:
        if instance.state.is_held:
            instance.assign(instance.changed(is_held=False))
            instance.post_state()


def wake_up(instance: SteeredInstance, request: WakeUp) -> Steps:
    """Wake parts. A pause stays."""
    tags: tuple[SleepTag, ...] = tuple(tag for tag in instance.state.asleep if tag not in request.tags)
    level = instance.state.sleep_level if tags else 0
    with _released_afterwards(instance):
        yield from adopt(instance, {"asleep": tags, "sleep_level": level, "is_held": instance.shares_experts})
    return {"status": "sleeping" if tags else "awake", "tags": list(tags)}


def reset_prefix_cache(instance: SteeredInstance, request: ResetPrefixCache) -> Steps:
    """Empty the prefix caches of all engines."""
    replies = yield Commands({record.engine: request for record in instance.steered})
    replies.raise_failure()
    return {"success": all(result.get("success", False) for result in replies.results.values())}


def abort_requests(instance: SteeredInstance, request: AbortRequests) -> Steps:
    """Abort requests on all clients."""
    bodies: dict[MemberId, CommandBody] = dict.fromkeys(instance.clients, request)
    replies = yield Commands(bodies)
    replies.raise_failure()
    return {"status": "aborted", "aborted": replies.total("aborted")}


def set_weight_version(instance: SteeredInstance, request: SetWeightVersion) -> Steps:
    """Rename the weights."""
    yield from adopt(instance, {"weight_version": request.new_version})
    return {"success": True, "new_version": request.new_version}


def weight_info(instance: SteeredInstance, operation: Answer | None, dropped: str | None) -> Answer:
    """Return the answer to `GetWeightInfo`. `operation`: description of the current operation. `dropped`: reason why an
    update was dropped in this pause."""
    state = instance.state
    records = sorted(instance.engines.values(), key=lambda record: record.engine.rank)
    joined = [record.update for record in records if record.has_joined and record.update is not None]
    return {
        "weight_version": instance.labels[max(joined, default=state.update)],
        "update": max(joined, default=state.update),
        "required": state.update,
        "instance": instance.name,
        "state": state.name,
        "is_paused": state.pause is not None,
        "asleep": list(state.asleep),
        "operation": operation,
        "dropped": dropped,
        "engines": [_engine_info(instance, record.engine) for record in records],
    }


def _engine_info(instance: SteeredInstance, engine: EngineId) -> Answer:
    record = instance.engines[engine]
    if not record.is_started:
        phase = "starting"
    else:
        phase = "ready" if record.has_joined and record.update is not None else "waiting"
    label = instance.labels.get(record.update) if record.is_started else None
    return {"rank": engine.rank, "incarnation": engine.incarnation, "weight_version": label, "state": phase}
