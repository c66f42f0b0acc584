"""Messages of a client to an engine."""

from __future__ import annotations

import msgspec

from eagleray.identity import ClientId
from eagleray.messages.sampling import Sampling, Stopping


class Generate(msgspec.Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Generate a continuation of this prompt. The engine replies with `Chunk`s until one has a finish reason.

    An engine with a pooling model computes the prompt alone, and replies with its vector. Sampling and stopping mean
    nothing then, except that `max_tokens` is 1.
    """

    request_id: str
    """Id, unique among the requests of its client."""
    client: ClientId
    prompt_token_ids: list[int]
    sampling: Sampling
    stopping: Stopping
    priority: int = 0
    """Priority; under priority scheduling, lower runs first."""
    cache_salt: str = ""
    """Salt of the prefix cache: requests share cached prefixes only with requests of the same salt."""
    adapter: str = ""
    """Name of the low-rank adapter of the request; empty without one."""
    adapter_number: int = 0
    """Number of the adapter's load, see `Adapter.number`. It enters the names of cached prefixes."""
    output_token_ids: list[int] = []
    """Tokens that an earlier engine has generated; the engine resumes after them, and its chunks hold only new ones."""
    prompt_logprobs_from: int = 1
    """First position whose prompt log-probabilities are still missing."""
    routed_experts_from: int | None = None
    """First position whose routed experts are still missing; None if they are not requested."""
    skip_reading_prefix_cache: bool = False
    """Whether to compute every token, even if the prefix cache has some."""
    is_suspect: bool = False
    """Whether several engines exited while this request ran on them. The engine runs one suspect at a time and
    announces its start (a `Chunk` with `is_started`, sent before its first step), so that its client knows which one it
    was."""
    pools: bool = False
    """Whether the request is for a pooling model, see `EngineInfo.pooling`."""
    announce_start: bool = False
    """Whether to announce the start as for a suspect, although the request may run among others."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Abort these requests. The engine replies with a last `Chunk` with finish reason `abort` for each that was
    running."""

    client: ClientId
    request_ids: list[str]


class CallWorkers(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Call a method of the worker extension on every worker. The engine replies with one `WorkersReturned`."""

    client: ClientId
    call_id: int
    """Number, unique among the calls of its client."""
    method: str
    arguments: bytes
    """Arguments encoded by `plain.pack_arguments`."""
    timeout: float
    """Time limit in seconds for all workers together."""


ClientToEngine = Generate | Abort | CallWorkers
