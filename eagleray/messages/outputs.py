"""Messages of an engine to its clients."""

from __future__ import annotations

import enum

import msgspec

from eagleray.identity import EngineId
from eagleray.messages.arrays import Array
from eagleray.messages.distributions import EngineDistributions
from eagleray.messages.failure import Failure


class FinishReason(enum.StrEnum):
    """Reason for which a request finished: the values of the OpenAI API, and three more."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"
    """The tokens repeat one pattern, see `SamplingParams.repetition_detection`. Engines do not send it."""


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural logarithms) or logits at one position, of the kind that the engine's option
    `logprobs_mode` names. Minus infinity stands for a token that the sampling parameters drop.

    `token_ids[0]` is the chosen token, then the likeliest ones in order, then the ids that were asked for.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the chosen token by these numbers: 1 is the likeliest."""


class PromptLogprobs(msgspec.Struct, frozen=True, eq=False):
    """Log-probabilities of the prompt's tokens `start`, `start + 1`, … given the tokens before them, or logits in a
    `logprobs_mode` of logits: always the model's own.

    Columns are ordered as in `TokenLogprobs`: the prompt's own token first, then the likeliest, then the ids that
    `Sampling.prompt_logprob_token_ids` asks for.
    """

    start: int
    """Position in the prompt of the first row; at least 1, because nothing precedes the first token."""
    token_ids: Array
    """int32 [num_positions, 1 + k + number of ids asked for]"""
    logprobs: Array
    """float32 of the same shape"""
    ranks: Array
    """int32 [num_positions]"""


class Chunk(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Result of one step for one request, unless it is one of `Chunks.tokens` or `Chunks.columns`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    """Log-probabilities of each of `token_ids` if the request asked for them, else empty."""
    prompt_logprobs: PromptLogprobs | None = None
    pooled: Array | None = None
    """float32 [size] Vector of the prompt with a pooling model, in the last chunk: the pooled hidden state as it is, or
    the outputs of the classifier's head before any activation."""
    routed_experts: bytes = b""
    """[num_tokens, num_moe_layers, top_k], if the request asked for it: the experts of the computed tokens after those
    of earlier chunks, from the likeliest to the least, by the model's own numbers. See `RoutingInfo.rows`. They are
    plain bytes, since every token of every request may bring some."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the prefix cache when this engine first scheduled the request."""
    queue_time: float = 0.0
    """Seconds from the arrival of the request in this engine to its admission. Set with the first output."""
    prefill_time: float = 0.0
    """Seconds from the admission to the first output. Set with that output."""
    is_started: bool = False
    """Whether the workers are about to compile the grammar of the request, or to compute its first step. Set for
    suspects and if `announce_start` asks for it."""
    finish_reason: FinishReason | None = None
    weight_version: str | None = None
    """Version of the weights that made `token_ids` and the following tokens, where it changes. The first tokens from
    an engine have `FIRST_WEIGHT_VERSION` unless their chunk names another."""
    stop_token_id: int | None = None
    """Stop token that finished the request; None for the model's own end-of-sequence token."""
    error: str | None = None
    """Error message for the user, with finish reason `error`."""
    is_user_error: bool = False
    """Whether a request with finish reason `error` asks for something impossible; otherwise it failed while it ran."""
    param: str | None = None
    """Field of the request that such an error is about, if it is known."""


class TokenColumns(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next token of some requests, with its log-probabilities and routed experts: an entry of each list for each
    request."""

    request_ids: list[str]
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] = []
    """Log-probabilities of the token if the request asked for them, else None. Empty if no request has any."""
    routed_experts: list[bytes] = []
    """[num_moe_layers, top_k] experts of the token before this one if the request asked for them, else no bytes. See
    `Chunk.routed_experts`. Empty if no request has any."""


class Chunks(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """All output of one step for one client. Each request is in one of the three. The first token of a request and its
    last output come in chunks."""

    engine: EngineId
    chunks: list[Chunk]
    tokens: dict[str, int] = {}
    """The token of each request for which the step has nothing else, by its id."""
    columns: TokenColumns | None = None
    """Requests for which the step has a token that was asked for with log-probabilities or routed experts, and nothing
    else."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True):
    """Load and totals of a scheduler. Counters only grow during an incarnation of its engine."""

    num_running: int
    num_waiting: int
    num_kv_blocks: int
    num_free_kv_blocks: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    """Prompt tokens computed, without those found in the prefix cache."""
    num_generation_tokens: int
    num_prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    num_prefix_hits: int
    """Prompt tokens found in the prefix cache."""
    num_grammar_queries: int = 0
    """Requests with a grammar."""
    num_grammar_hits: int = 0
    """Requests whose grammar was compiled when they came."""
    num_drafts: int = 0
    """Drafts that steps have checked, one for each row of a step that had some."""
    num_draft_tokens: int = 0
    """Tokens of these drafts."""
    num_accepted_tokens: int = 0
    """Tokens of drafts that were generated."""
    accepted_by_position: list[int] = []
    """The same by their position in the draft. Empty without speculation."""
    num_constrained: int = 0
    """Number of the running requests that have a grammar."""
    update: int = 0
    """Number of the last weight update that the engine has applied. Prompts are not found in the cache of an earlier
    one."""
    num_deferred: int = 0
    """Number of the waiting requests that would not be admitted if there were room: suspects that wait for their turn,
    requests that wait for their grammar, and requests that a pause holds back."""
    running_adapters: tuple[str, ...] = ()
    """Names of the adapters of requests that are computed."""
    waiting_adapters: tuple[str, ...] = ()
    """Names of the adapters of requests that wait."""
    distributions: EngineDistributions | None = None
    """Histograms of steps and requests, which only grow as well."""


class EngineStats(SchedulerStats, frozen=True, kw_only=True, tag=True):
    """Load and totals of an engine."""

    engine: EngineId


class WorkersReturned(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a `CallWorkers`: values of every worker, or a failure."""

    call_id: int
    values: list[bytes] = []
    """Values encoded by `plain.pack`, in order of rank; empty with a failure."""
    failure: Failure | None = None
    """Failure of the call: a user error if the call cannot be made, otherwise the method's exception or what kept it
    from returning."""
    rank: int | None = None
    """Lowest rank on which the method raised; None if none did."""


class ExpertLoad(msgspec.Struct, frozen=True, kw_only=True, tag=True, eq=False):
    """Number of tokens that each expert has computed in this incarnation of the engine."""

    engine: EngineId
    counts: Array
    """int64 [num_moe_layers, num_experts], for the layers that have experts, in the model's order."""


EngineToClient = Chunks | EngineStats | ExpertLoad | WorkersReturned
