"""Output of engines as chunks alone, for tests that do not mind in which form a token arrives."""

from __future__ import annotations

from eagleray.identity import EngineId
from eagleray.messages.outputs import Chunk, Chunks, TokenColumns
from eagleray.scheduler.step_outputs import AddressedChunk, StepOutputs

ENGINE = EngineId("test", 0)


def chunks_of(message: Chunks) -> list[Chunk]:
    """Return the chunks of a message, and one for each token that has none."""
    tokens = [Chunk(request_id=name, token_ids=[token_id]) for name, token_id in message.tokens.items()]
    detailed = [] if message.columns is None else _chunks_of_columns(message.columns)
    chunks = [*message.chunks, *tokens, *detailed]
    assert len({chunk.request_id for chunk in chunks}) == len(chunks), "a request is in the message twice"
    return chunks


def addressed_chunks(outputs: StepOutputs) -> list[AddressedChunk]:
    """Return the chunks of a step, and one for each token that has none."""
    messages = outputs.messages(ENGINE)
    return [AddressedChunk(client, chunk) for client, message in messages.items() for chunk in chunks_of(message)]


def _chunks_of_columns(columns: TokenColumns) -> list[Chunk]:
    count = len(columns.request_ids)
    assert len(columns.token_ids) == count
    assert {len(columns.logprobs), len(columns.routed_experts)} <= {0, count}
    return [
        Chunk(
            request_id=name,
            token_ids=[token_id],
            logprobs=[columns.logprobs[index]] if columns.logprobs and columns.logprobs[index] else [],
            routed_experts=columns.routed_experts[index] if columns.routed_experts else b"",
        )
        for index, (name, token_id) in enumerate(zip(columns.request_ids, columns.token_ids, strict=True))
    ]
