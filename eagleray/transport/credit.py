"""Flow control of a link between nodes: credits counted in bytes, and numbered messages. Pure.

A sender has at most a window of bytes in flight that the receiver has not consumed, so that a slow receiver slows
the sender, and queues in sockets are bounded. A message of more than three quarters of the window counts as three
quarters: it is sent when at most a quarter is in flight. A receiver acknowledges what it consumed with each message
of its own, and in a message for that purpose once a quarter of the window is owed; therefore a sender that waits
for room gets it.
"""

from __future__ import annotations

import enum
import struct

from eagleray.errors import ChannelClosed

HEADER = struct.Struct("<BQQ")
"""Kind, number of the message, total of consumed bytes."""


class Kind(enum.IntEnum):
    HELLO = 1
    """Greeting of a peer, followed by its secret."""
    WELCOME = 2
    DATA = 3
    CREDIT = 4
    BYE = 5
    """Last message of a side, which neither sends nor reads afterwards."""


class Flow:
    """One end of a link: bytes sent and not yet consumed, bytes consumed and not yet acknowledged."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._quarter = window // 4
        self._sent = 0  # messages sent
        self._charged = 0  # bytes sent in all, as `_charge` counts them
        self._acknowledged = 0  # the part of these that the other side has consumed
        self._arrived = 0  # messages received
        self._consumed = 0  # bytes consumed here in all, as `_charge` counts them
        self._announced = 0  # the part of these that the other side was told in a header
        self.ended = False
        """Whether the other side has sent BYE."""

    def fits(self, num_bytes: int) -> bool:
        """Whether a message of that size may be sent now."""
        return self._charged - self._acknowledged + self._charge(num_bytes) <= self._window

    def send(self, num_bytes: int) -> bytes:
        """Count a message that is sent now and return its header."""
        self._charged += self._charge(num_bytes)
        self._sent += 1
        return self._header(Kind.DATA, self._sent)

    def on_arrival(self, header: bytes) -> Kind:
        """Count a message from the other side. Raises `ChannelClosed` if one before it is missing."""
        kind, number, consumed = HEADER.unpack(header)
        self._acknowledged = max(self._acknowledged, consumed)
        if kind == Kind.DATA:
            self._arrived += 1
            if number != self._arrived:
                raise ChannelClosed(f"message {number} has arrived where message {self._arrived} was due")
        elif kind == Kind.BYE:
            self.ended = True
        return Kind(kind)

    def consume(self, num_bytes: int) -> bytes | None:
        """Count a consumed message of that size. Returns the header of an acknowledgement if one must be sent now."""
        self._consumed += self._charge(num_bytes)
        if self._consumed - self._announced < self._quarter:
            return None
        return self._header(Kind.CREDIT, 0)

    def control(self, kind: Kind) -> bytes:
        """Return the header of a message without data."""
        return self._header(kind, 0)

    def _charge(self, num_bytes: int) -> int:
        return min(num_bytes, self._window - self._quarter)

    def _header(self, kind: Kind, number: int) -> bytes:
        self._announced = self._consumed
        return HEADER.pack(kind, number, self._consumed)
