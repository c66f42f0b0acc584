"""What engines that step together say to each other. Everything else goes between their workers."""

from __future__ import annotations

import msgspec

from eagleray.identity import EngineId


class WaveStarted(msgspec.Struct, frozen=True, tag=True):
    """I have work and take steps again: take them with me, when you are done with the wave before this one."""

    engine: EngineId
    epoch: int
    """Of the group; waves are counted from 1 in each."""
    wave: int


EngineToEngine = WaveStarted
