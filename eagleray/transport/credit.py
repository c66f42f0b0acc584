"""What keeps a link between nodes in order: credits counted in bytes, and numbers on the messages. Pure.

A sender has at most a window of bytes under way that the receiver's user has not taken, so that a slow receiver slows
the sender, and what waits in sockets is bounded. A message of more than three quarters of the window counts as three
quarters: it goes when at most a quarter is under way. A receiver says what was taken with each message of its own,
and in a message for that purpose once a quarter of the window is owed; therefore whoever waits for room gets it.
"""

from __future__ import annotations

import enum
import struct

from eagleray.errors import ChannelClosed

HEADER = struct.Struct("<BQQ")
"""Kind, number of the message, bytes taken in all."""


class Kind(enum.IntEnum):
    HELLO = 1
    """A peer introduces itself: its secret follows."""
    WELCOME = 2
    DATA = 3
    CREDIT = 4
    BYE = 5
    """No more is sent or read."""


class Flow:
    """One end of a link: what was sent and not yet taken, what arrived and was not yet acknowledged."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._quarter = window // 4
        self._sent = 0  # messages
        self._charged = 0  # bytes sent in all, as they count
        self._acknowledged = 0  # of these, taken by the other side
        self._arrived = 0  # messages
        self._taken = 0  # bytes taken by our user in all, as they count
        self._announced = 0  # of these, the other side knows of
        self.ended = False
        """The other side has said that it neither sends nor reads any more."""

    def fits(self, num_bytes: int) -> bool:
        """Whether a message of that size may go now."""
        return self._charged - self._acknowledged + self._charge(num_bytes) <= self._window

    def send(self, num_bytes: int) -> bytes:
        """The header of a message that goes now."""
        self._charged += self._charge(num_bytes)
        self._sent += 1
        return self._header(Kind.DATA, self._sent)

    def arrive(self, header: bytes) -> Kind:
        """Take note of a message from the other side. Raises `ChannelClosed` if one is missing before it."""
        kind, number, taken = HEADER.unpack(header)
        self._acknowledged = max(self._acknowledged, taken)
        if kind == Kind.DATA:
            self._arrived += 1
            if number != self._arrived:
                raise ChannelClosed(f"message {number} has arrived where message {self._arrived} was due")
        elif kind == Kind.BYE:
            self.ended = True
        return Kind(kind)

    def take(self, num_bytes: int) -> bytes | None:
        """Our user has taken a message of that size. The header of a message that must go now to say so, if any."""
        self._taken += self._charge(num_bytes)
        if self._taken - self._announced < self._quarter:
            return None
        return self._header(Kind.CREDIT, 0)

    def control(self, kind: Kind) -> bytes:
        """The header of a message without data."""
        return self._header(kind, 0)

    def _charge(self, num_bytes: int) -> int:
        return min(num_bytes, self._window - self._quarter)

    def _header(self, kind: Kind, number: int) -> bytes:
        self._announced = self._taken
        return HEADER.pack(kind, number, self._taken)
