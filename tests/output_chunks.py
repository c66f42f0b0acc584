"""Output of engines as chunks alone, for tests that do not mind in which form a token arrives."""

from __future__ import annotations

from eagleray.messages.outputs import Chunk, Chunks
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs


def chunks_of(message: Chunks) -> list[Chunk]:
    """Return the chunks of a message, and one for each token that has none."""
    tokens = [Chunk(request_id=name, token_ids=[token_id]) for name, token_id in message.tokens.items()]
    return [*message.chunks, *tokens]


def addressed_chunks(outputs: StepOutputs) -> list[AddressedChunk]:
    """Return the chunks of a step, and one for each token that has none."""
    tokens = [
        AddressedChunk(client, Chunk(request_id=name, token_ids=[token_id]))
        for client, named in outputs.tokens.items()
        for name, token_id in named.items()
    ]
    return [*outputs.chunks, *tokens]
