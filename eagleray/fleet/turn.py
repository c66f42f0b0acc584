"""A turn of the fleet's state machine: the event's time, the actions that it leads to, and the timers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from eagleray.fleet.events import Action, Send, ToMember
from eagleray.fleet.timers import Timers
from eagleray.identity import ClientId, MemberId


@dataclass(frozen=True)
class LeaseTimer:
    client: ClientId


@dataclass(frozen=True)
class BrokenConnectionTimer:
    ends: tuple[MemberId, ...]
    """(sender, receiver), or (receiver,) for a connection of the supervisor"""


@dataclass(frozen=True)
class ControlTimer:
    """The next deadline of the control calls."""


@dataclass(frozen=True)
class StopTimer:
    """The end of the time that external clients have to leave."""


@dataclass(frozen=True)
class ScalingTimer:
    """The next deadline of scaling, or of its callers."""


TimerKey = MemberId | LeaseTimer | BrokenConnectionTimer | ControlTimer | StopTimer | ScalingTimer
"""The timer of a replica has its replica key."""


class Turn:
    """Shared by the parts of `FleetState`, which begins a new turn with each event."""

    def __init__(self) -> None:
        self.now = 0.0
        """Time of the event, in seconds of a monotonic clock."""
        self.unix_time = 0.0
        """The same as Unix time."""
        self.timers: Timers[TimerKey] = Timers()
        self._actions: list[Action] = []

    def begin(self, now: float, unix_time: float) -> None:
        self.now, self.unix_time = now, unix_time

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def send(self, message: ToMember, *receivers: MemberId) -> None:
        if receivers:
            self._actions.append(Send(receivers, message))

    def end(self) -> list[Action]:
        """Return the actions in their order."""
        actions, self._actions = self._actions, []
        return actions
