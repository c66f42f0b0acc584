"""Messages between the engines of an expert group. Everything else goes between their workers."""

from __future__ import annotations

import msgspec

from eagleray.identity import EngineId


class WaveStarted(msgspec.Struct, frozen=True, tag=True):
    """An engine with work starts a wave; the others join it when the wave before it has ended for them."""

    engine: EngineId
    epoch: int
    """Epoch of the group; waves are counted from 1 in each."""
    wave: int


EngineToEngine = WaveStarted
