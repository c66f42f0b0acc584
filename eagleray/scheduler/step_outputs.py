"""Output of a step for the clients. Made by the scheduler, sent by the engine loop."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

from eagleray.identity import ClientId, EngineId
from eagleray.messages.outputs import Chunk, Chunks, TokenColumns, TokenLogprobs


class AddressedChunk(NamedTuple):
    """A chunk and the client that it is sent to."""

    client: ClientId
    chunk: Chunk


DetailedToken = tuple[str, int, TokenLogprobs | None, bytes]
"""A request id, its token, the log-probabilities of it, and the routed experts of the token before. Not a named tuple,
because that takes four times as long to make."""


@dataclass(slots=True)
class StepOutputs:
    """A token or a chunk for each request that has new output. Most requests of a step have one token and nothing else
    than what they asked for with each token, for which no chunk is made."""

    tokens: defaultdict[ClientId, dict[str, int]] = field(default_factory=lambda: defaultdict(dict))
    """Tokens by client and request id."""
    detailed: defaultdict[ClientId, list[DetailedToken]] = field(default_factory=lambda: defaultdict(list))
    """Tokens with log-probabilities or routed experts by client."""
    chunks: list[AddressedChunk] = field(default_factory=list)

    def messages(self, engine: EngineId) -> dict[ClientId, Chunks]:
        """Return the message of the engine to each client that has output."""
        messages = {client: Chunks(engine, [], tokens) for client, tokens in self.tokens.items()}
        for client, detailed in self.detailed.items():
            messages[client] = Chunks(engine, [], self.tokens.get(client, {}), _columns(detailed))
        for client, chunk in self.chunks:
            if client not in messages:
                messages[client] = Chunks(engine, [])
            messages[client].chunks.append(chunk)
        return messages


def _columns(tokens: list[DetailedToken]) -> TokenColumns:
    """Return the columns of these tokens, and leave out those without any value."""
    request_ids, token_ids, logprobs, experts = map(list, zip(*tokens, strict=True))
    return TokenColumns(request_ids, token_ids, logprobs if any(logprobs) else [], experts if any(experts) else [])
