"""Waves: series of steps that all engines of an expert group take together. Pure.

If one engine skipped a step of a wave, the others would wait for it. Each engine decides alone whether the wave
continues, from what all of them know: the result of every step says whether any engine was busy in it. A wave starts
with a length of `depth`, the number of steps that an engine has in flight; if any engine is busy in step k, the wave
becomes at least k + 1 + depth steps long. So all engines take the same steps, whichever is ahead, and the wave ends
everywhere `depth` idle steps after the last busy one.

Any engine that has work starts the next wave once the last one has ended for it, and notifies the others, which join as
soon as the last one has ended for them. Several engines may start the same wave. Notifications of an earlier group are
ignored.

Owned by the engine core; started and stopped by the expert group member.
"""

from __future__ import annotations


class Waves:
    """Counts the steps of a wave. `depth`: steps in flight, the same on all engines. No wave starts before `form`."""

    def __init__(self, *, depth: int) -> None:
        self._depth = depth
        self._requested = (0, 0)  # epoch and number of the newest wave that another engine has started
        self.epoch = 0
        self.wave = 0
        """Number of the newest wave that this engine has taken part in."""
        self._limit = 0
        self._num_sent = 0
        self._num_done = 0

    def form(self, epoch: int) -> None:
        """Enter the group of `epoch`, whose first wave has number 1 and may have started already."""
        self.epoch, self.wave = epoch, 0
        self.stop()

    def stop(self) -> None:
        """Stop the wave: no step will be sent, and no result will arrive."""
        self._limit = self._num_sent = self._num_done = 0

    def on_wave_started(self, epoch: int, wave: int) -> None:
        """Note that another engine started this wave, perhaps of a group that this engine has not joined yet."""
        self._requested = max(self._requested, (epoch, wave))

    @property
    def is_on(self) -> bool:
        """Whether steps of the wave are left to send or results are left to arrive."""
        return self._num_done < self._limit

    @property
    def is_requested(self) -> bool:
        """Whether others started a wave that this engine has not taken part in."""
        epoch, wave = self._requested
        return epoch == self.epoch and wave > self.wave

    def maybe_start(self, *, has_work: bool) -> bool:
        """Start the next wave if there is a reason and none is on. Returns whether the others must be notified."""
        if self.is_on or not (has_work or self.is_requested):
            return False
        is_requested = self.is_requested
        self.wave += 1
        self._limit, self._num_sent, self._num_done = self._depth, 0, 0
        return not is_requested

    @property
    def may_send(self) -> bool:
        """Whether the wave has another step to send, which may be idle."""
        return self._num_sent < self._limit

    def on_sent(self) -> None:
        """Count a step that was sent."""
        self._num_sent += 1

    def on_result(self, *, any_engine_busy: bool) -> None:
        """Count the result of the oldest step; the wave is extended if any engine was busy in it."""
        self._num_done += 1
        if any_engine_busy:
            self._limit = self._num_done + self._depth
