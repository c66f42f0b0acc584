"""When an engine takes steps that other engines take too. Pure: what has happened is told.

A wave is a sequence of steps that all engines of a group take together: what one leaves out, the others wait for. Each
engine decides alone whether it goes on, by what all of them know: the result of every step says whether one of them
worked in it. A wave begins with as many steps as an engine has in flight, its `depth`; a step k in which somebody
worked makes it at least k + 1 + depth steps long. So all take the same steps, whoever is ahead, and when the last
request is done anywhere, `depth` idle steps later the wave is over everywhere.

The next wave is begun by any engine that has work, when the last one is over for it: it tells the others, who come
along as soon as it is over for them. Several may begin the same one; and the calls of a group that is no more mean
nothing.

Owned by the engine's core; begun and ended by its company.
"""

from __future__ import annotations


class Waves:
    """`depth`: steps in flight, the same on all engines. There is no wave before `form`."""

    def __init__(self, *, depth: int) -> None:
        self._depth = depth
        self._called = (0, 0)  # epoch and number of the newest wave that another engine has begun
        self.epoch = 0
        self.wave = 0
        """The newest one that this engine has taken part in."""
        self._limit = 0
        self._num_sent = 0
        self._num_done = 0

    def form(self, epoch: int) -> None:
        """There is a group: its first wave is number 1. It may have begun already."""
        self.epoch, self.wave = epoch, 0
        self.end()

    def end(self) -> None:
        """There is none any more: no step is to be sent, and none will come back."""
        self._limit = self._num_sent = self._num_done = 0

    def hear(self, epoch: int, wave: int) -> None:
        """Another engine has begun this wave, perhaps of a group that this one has not joined yet."""
        self._called = max(self._called, (epoch, wave))

    @property
    def is_on(self) -> bool:
        """There are steps to take, or their results to come."""
        return self._num_done < self._limit

    @property
    def is_called(self) -> bool:
        """Others have begun a wave that this engine has not taken part in."""
        epoch, wave = self._called
        return epoch == self.epoch and wave > self.wave

    def begin(self, *, has_work: bool) -> bool:
        """Begin the next wave if there is a reason, unless one is on. Whether the others must be told."""
        if self.is_on or not (has_work or self.is_called):
            return False
        is_called = self.is_called
        self.wave += 1
        self._limit, self._num_sent, self._num_done = self._depth, 0, 0
        return not is_called

    @property
    def may_send(self) -> bool:
        """The next step is one of the wave: if this engine has nothing to do in it, it steps for the others' sake."""
        return self._num_sent < self._limit

    def sent(self) -> None:
        """A step was sent."""
        self._num_sent += 1

    def returned(self, *, any_engine_busy: bool) -> None:
        """The result of the oldest step that was sent: whether one of the engines worked in it."""
        self._num_done += 1
        if any_engine_busy:
            self._limit = self._num_done + self._depth
