"""One operation of an instance, from its arrival to its answer: its callers, its progress, and the replies it awaits.

Owned and changed by `Control`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eagleray.fleet.control.caller import Caller
from eagleray.fleet.control.operations import Condition, Replies, Steps
from eagleray.fleet.control.rules import NAMES
from eagleray.identity import MemberId
from eagleray.messages.control import ControlCall, ControlRequest


@dataclass
class ControlOperation:
    """A call that is executed or queued, with all its callers."""

    key: bytes
    operation_id: str
    request: ControlRequest
    callers: list[Caller]
    began: float | None = None
    """Time at which the operation began; None while it is queued."""
    deadline: float = 0.0
    steps: Steps | None = None
    condition: Condition | None = None
    awaited: dict[int, MemberId] = field(default_factory=dict)
    """Members that have not replied, by the numbers of their commands."""
    replies: Replies = field(default_factory=Replies)
    fails_fast: bool = False

    @property
    def name(self) -> str:
        return NAMES[type(self.request)]

    def reason(self, current: ControlOperation | None, now: float) -> str:
        """Return the reason why the operation has not ended. `current`: the operation that is executed."""
        if self is not current:
            if current is None or current.began is None:
                return "it was queued"
            seconds = now - current.began
            return f"it waits for {current.name} (operation {current.operation_id}), which has run for {seconds:.0f} s"
        if self.condition is not None:
            return self.condition.reason()
        members = sorted({member.label for member in self.awaited.values()})
        return f"{', '.join(members)} {'has' if len(members) == 1 else 'have'} not replied"

    def describe(self, now: float, num_queued: int) -> dict[str, Any]:
        """Describe the operation, which is being executed, for users."""
        waiting = {member.label: "waiting" for member in self.awaited.values()}
        done = {member.label: "done" for member in self.replies.results}
        return {
            "name": self.name,
            "id": self.operation_id,
            "seconds": 0.0 if self.began is None else round(now - self.began, 3),
            "members": waiting | done,
            "num_queued": num_queued,
        }


def key_of(call: ControlCall) -> bytes:
    """Return the key of the operation: a digest of its id and its request."""
    asked = msgspec.msgpack.encode((call.operation_id, call.request))
    return hashlib.blake2b(asked, digest_size=16).digest()
