"""What a client asks of an engine."""

from __future__ import annotations

import msgspec

from eagleray.identity import ClientId
from eagleray.messages.sampling import Sampling, Stopping


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Continue this prompt. Answered by `Chunk`s until one has a finish reason."""

    request_id: str
    """Unique among the requests of its client."""
    client: ClientId
    prompt_token_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    priority: int = 0
    """Under priority scheduling, lower runs first."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of the same salt."""
    output_token_ids: list[int] = []
    """What an engine before this one has generated: go on after it. Chunks bring what is new."""
    prompt_logprobs_from: int = 1
    """The first position whose prompt log-probabilities are still missing."""
    routed_experts_from: int | None = None
    """The first position whose routed experts are still missing; None: they are not asked for."""
    is_suspect: bool = False
    """Engines have died with this request more than once: run no two such at a time, and say when one is started (a
    `Chunk` with `is_started`, sent before its first step), so that its client knows which one it was."""
    announce_start: bool = False
    """Say when it is started, as of a suspect, although it may run among others."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget these requests. Answered by a last `Chunk` with finish reason `abort` for each that was running."""

    client: ClientId
    request_ids: list[str]


class CallWorkers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call a method of the worker extension on every worker. Answered by one `WorkersReturned`."""

    client: ClientId
    call_id: int
    """Unique among the calls of its client."""
    method: str
    arguments: bytes
    """Of `plain.pack_arguments`."""
    timeout: float
    """Seconds that the workers have, all together."""


ClientToEngine = Generate | Abort | CallWorkers
