"""Output of a step for the clients. Made by the scheduler, sent by the engine loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from eagleray.identity import ClientId, EngineId
from eagleray.messages.outputs import Chunk, Chunks, TokenColumns, TokenLogprobs

DetailedToken = tuple[str, int, TokenLogprobs | None, bytes]
"""A request id, the token, its log-probabilities, and the routed experts of the token before. Not a named tuple, which
takes four times as long to make."""


class AddressedChunk(NamedTuple):
    """A chunk and the client that it is sent to."""

    client: ClientId
    chunk: Chunk


@dataclass(slots=True)
class ClientOutputs:
    """Output of a step for one client: a token or a chunk for each request that has some. Most requests of a step have
    a token and nothing but what they asked for with each of their tokens, for which no chunk is made."""

    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens by request id."""
    detailed: list[DetailedToken] = field(default_factory=list)
    """Tokens with log-probabilities or routed experts."""
    chunks: list[Chunk] = field(default_factory=list)

    def message(self, engine: EngineId) -> Chunks:
        """Return the message of the engine to the client."""
        return Chunks(engine, self.chunks, self.tokens, _columns(self.detailed) if self.detailed else None)


@dataclass(slots=True)
class StepOutputs:
    """Output of a step by client."""

    by_client: defaultdict[ClientId, ClientOutputs] = field(default_factory=lambda: defaultdict(ClientOutputs))

    @classmethod
    def of(cls, chunks: Iterable[AddressedChunk]) -> StepOutputs:
        """Return outputs with these chunks alone."""
        outputs = cls()
        outputs.add(chunks)
        return outputs

    def add(self, chunks: Iterable[AddressedChunk]) -> None:
        """Add chunks for clients."""
        for client, chunk in chunks:
            self.by_client[client].chunks.append(chunk)

    def messages(self, engine: EngineId) -> dict[ClientId, Chunks]:
        """Return the message of the engine to each client that has output."""
        return {client: outputs.message(engine) for client, outputs in self.by_client.items()}


def _columns(tokens: Iterable[DetailedToken]) -> TokenColumns:
    """Return the columns of these tokens, and leave out those without any value."""
    request_ids, token_ids, logprobs, experts = map(list, zip(*tokens, strict=True))
    return TokenColumns(request_ids, token_ids, logprobs if any(logprobs) else [], experts if any(experts) else [])
