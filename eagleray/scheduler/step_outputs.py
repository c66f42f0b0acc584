"""Output of a step for the clients. Made by the scheduler, sent by the engine loop."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from eagleray.identity import ClientId, EngineId
from eagleray.messages.outputs import Chunk, Chunks


class AddressedChunk(NamedTuple):
    """A chunk and the client that it is sent to."""

    client: ClientId
    chunk: Chunk


@dataclass(slots=True)
class StepOutputs:
    """A token or a chunk for each request that has new output. Most requests of a step have one token and nothing else,
    for which no chunk is made."""

    tokens: defaultdict[ClientId, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Tokens by client and request id."""
    chunks: list[AddressedChunk] = field(default_factory=list)

    def messages(self, engine: EngineId) -> dict[ClientId, Chunks]:
        """Return the message of the engine to each client that has output."""
        messages = {client: Chunks(engine, [], tokens) for client, tokens in self.tokens.items()}
        for client, chunk in self.chunks:
            if client not in messages:
                messages[client] = Chunks(engine, [])
            messages[client].chunks.append(chunk)
        return messages
