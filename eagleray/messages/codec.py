"""Messages to frames and back: msgpack for the fields, frames of their own for large arrays. No pickle.

A small array travels inside its message. A large one is a frame, so that it is never copied into the encoder's buffer.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from eagleray.messages.arrays import Frame

Message = TypeVar("Message")

INLINE_BYTES = 4096
"""Size up to which an array is part of its message: a frame of its own costs more than the copy."""


class Codec(Generic[Message]):
    """Encodes and decodes the messages of one wire. Not thread-safe: each end of a wire has its own.

    `kind` is the wire's tagged union. Decoding raises `msgspec.ValidationError` for anything else.
    """

    def __init__(self, kind: Any) -> None:
        self._out: list[Frame] = []
        self._in: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)
        self._decoder = msgspec.msgpack.Decoder(kind, dec_hook=self._decode_array)

    def encode(self, message: Message) -> list[Frame]:
        """Encode a message. The first frame holds the message, the others its large arrays."""
        self._out = [b""]
        self._out[0] = self._encoder.encode(message)
        frames, self._out = self._out, []
        return frames

    def decode(self, frames: list[Frame]) -> Message:
        """Decode a message. Its arrays alias `frames`, which must be memory that the receiver owns."""
        self._in = frames
        try:
            message: Message = self._decoder.decode(frames[0])
        finally:
            self._in = []
        return message

    def _encode_array(self, value: Any) -> tuple[str, tuple[int, ...], bytes | int]:
        """Return (dtype, shape, data), where data is the bytes or the index of the frame that holds them."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a {type(value).__name__} cannot be part of a message")
        array = np.ascontiguousarray(value)
        if array.nbytes <= INLINE_BYTES:
            return array.dtype.str, array.shape, array.tobytes()
        self._out.append(array.data.cast("B"))
        return array.dtype.str, array.shape, len(self._out) - 1

    def _decode_array(self, kind: Any, value: Any) -> Any:
        dtype, shape, data = value
        buffer = self._in[data] if isinstance(data, int) else data
        return np.frombuffer(buffer, dtype=np.dtype(dtype)).reshape(shape)
