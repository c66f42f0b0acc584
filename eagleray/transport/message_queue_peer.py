"""A worker's end of the message queue; the engine's is in `message_queue_hub.py`."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from time import monotonic

import msgspec

from eagleray.errors import ChannelClosed, DeadlineExceeded
from eagleray.transport.link import LinkPeer
from eagleray.transport.message_queue_handle import MessageQueueHandle
from eagleray.transport.ring import Frame
from eagleray.transport.shared_rings import SharedRingsPeer, supports_shared_memory

MEDIA = ("shared memory", "ipc", "tcp")

REMOTE_MEDIA = ("tcp",)
"""Media between hosts."""


class MessageQueuePeer:
    """A worker's end. One thread uses it; `wake` and `close` may be called from any."""

    def __init__(self, peer: SharedRingsPeer | LinkPeer) -> None:
        self.medium: str = peer.medium
        """Name of the medium: "shared memory", "ipc" or "tcp"."""
        self._peer = peer
        self._bell = peer.bell
        self._closed = False
        self._in_use = threading.Lock()

    @classmethod
    def open(
        cls, encoded: bytes, *, runtime_dir: Path | None = None, timeout: float, media: Collection[str] = MEDIA
    ) -> MessageQueuePeer:
        """Attach by the first of `media` that works from here.

        `runtime_dir` is the engine's directory as seen from here, if it has another name. Raises `ChannelClosed` if the
        engine cannot be reached, `DeadlineExceeded` if it does not reply.
        """
        handle = msgspec.msgpack.decode(encoded, type=MessageQueueHandle)
        if MEDIA[0] in media and handle.shared is not None and supports_shared_memory():
            with contextlib.suppress(OSError):  # another container, another host, another user
                return cls(SharedRingsPeer(handle.shared))
        return cls(
            LinkPeer(
                handle.contact,
                secret=handle.secret,
                window=handle.window,
                runtime_dir=runtime_dir,
                media=media,
                timeout=timeout,
            )
        )

    def receive(self, timeout: float) -> list[Frame] | None:
        """Return the engine's next message, or None after `timeout` seconds.

        Raises `ChannelClosed` when the engine has closed its end and everything was received.
        """
        with self._in_use:
            self._bell.check()
            frames = self._peer.pop()
            if frames is not None or timeout <= 0:
                return frames
            deadline = monotonic() + timeout
            while True:
                if reason := self._peer.closed_reason():
                    if (frames := self._peer.pop()) is not None:  # sent before the engine closed its end
                        return frames
                    raise ChannelClosed(reason)
                self._bell.wait(self._peer.ready, deadline, self._peer.flags)
                if (frames := self._peer.pop()) is not None:
                    return frames
                if monotonic() >= deadline:
                    return None

    def send(self, frames: Sequence[Frame], timeout: float) -> None:
        """Reply to the engine. Waits while the window is full; raises like `MessageQueueHub.send`."""
        with self._in_use:
            self._bell.check()
            begun = False
            deadline = 0.0
            try:
                for wrote in self._peer.write(frames):
                    if wrote:
                        begun = True
                        continue
                    deadline = deadline or monotonic() + timeout
                    if reason := self._peer.closed_reason():
                        raise ChannelClosed(reason)
                    if monotonic() >= deadline:
                        raise DeadlineExceeded(
                            f"the engine has no room for an answer: too little was read within {timeout:g} s"
                        )
                    self._bell.wait(self._peer.has_room, deadline, self._peer.room_flags)
            except BaseException:
                if begun:
                    self._peer.mark_broken()
                raise

    def close(self) -> None:
        """Close this end: waiting calls of other threads raise `ChannelClosed`. The engine can still receive what was
        sent."""
        self._bell.stop()
        with self._in_use:
            if not self._closed:
                self._closed = True
                self._peer.close()
