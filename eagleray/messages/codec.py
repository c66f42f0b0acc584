"""Messages to frames and back: msgpack for the fields, frames of their own for large arrays. No pickle."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np

from eagleray.messages.arrays import Frame, pack_array, unpack_array

Message = TypeVar("Message")


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

    def _encode_array(self, value: Any) -> Any:
        if isinstance(value, np.ndarray):
            return pack_array(value, self._out)
        raise TypeError(f"a {type(value).__name__} cannot be part of a message")

    def _decode_array(self, kind: Any, value: Any) -> Any:
        return unpack_array(value, self._in)
