"""Calls of an engine to its workers, and their replies.

A worker keeps a table of rows, one for each running request. A plan says which rows compute how many of their tokens.
The plan carries no sampled token: the worker that sampled a token already has it in the row. So the plan of the next
step does not depend on the result of this one. A row with drafts is the exception. It takes part in no further step
until the scheduler knows how many of them were accepted, and the plan of that step has its tokens.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from eagleray.messages.arrays import Array
from eagleray.messages.control import SleepTag
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.membership import ProcessInfo
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.messages.weight_transfer import TransferCall, TransferReply
from eagleray.messages.workers import EngineOpened, GroupOpened

GroupName = Literal["engine", "expert"]
"""`engine`: tensor-parallel group and pipeline links of one engine. `expert`: the workers that divide the experts, of
all engines that step together; this group has an epoch, because engines exit and are replaced."""


class CallDone(msgspec.Struct, frozen=True, tag=True):
    """Reply to a call that has no result."""


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """State of a request that enters a row, for the first time or again after a preemption."""

    row: int
    request_id: str
    token_ids: list[int]
    """Tokens of the prompt, then the tokens generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Number of the first tokens of `token_ids` that are in the cache already."""
    block_ids: list[int]
    """Blocks of the cache, in order of position, enough for what this step computes."""
    sampling: Sampling
    prompt_logprobs_from: int = 1
    """First prompt position whose log-probabilities are still wanted (if `sampling.prompt_logprobs` is set)."""
    adapter_slot: int = -1
    """Slot of the low-rank adapter for all tokens of the row; -1 without one."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step: a worker applies `freed_rows`, then `new_rows`, then `new_blocks`, then computes the tokens of `rows`.

    A row whose last known token is computed samples the next one, which becomes known; with a pooling model, its vector
    is reported. A row with drafts computes these behind its last known token, and samples one token after the other
    until one differs from the draft; none of them becomes known before a later plan has them in `settled_rows`. Every
    row named by `freed_rows`, `new_rows` or `new_blocks` is in a valid state afterwards; `rows` has
    no duplicates, and is empty only in an engine that steps together with others.
    """

    step: int
    freed_rows: list[int]
    """Rows whose request has finished, was aborted or was preempted."""
    new_rows: list[NewRow]
    new_blocks: list[tuple[int, list[int]]]
    """Pairs (row, block ids to append to its block table)."""
    rows: list[int]
    num_tokens: list[int]
    """Number of its next tokens that each of `rows` computes, drafts included; at least 1."""
    drafts: dict[int, list[int]] = {}
    """Drafted tokens by row, at least one each, for rows whose last known token is computed."""
    settled_rows: list[tuple[int, list[int]]] = []
    """Pairs (row, token ids) for those of `rows` whose last step had drafts: the tokens that it sampled. All but the
    last one are in the cache."""
    proposals: dict[int, int] = {}
    """Most tokens that the draft model proposes behind the tokens that a row samples in this step, by row."""
    capture_rows: list[int] = []
    """Subset of `rows`, in the same order, whose routed experts are reported."""
    is_idle: bool = False
    """Whether this engine has nothing to compute and steps only because the engines of its expert group do."""

    @property
    def total_num_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def label(self) -> str:
        """Description for logs: number and size of the step."""
        return f"step {self.step} ({self.total_num_tokens} tokens in {len(self.rows)} rows)"


class RowFailure(msgspec.Struct, frozen=True):
    """Failure of one row's request; the other rows are not affected."""

    row: int
    message: str
    is_user_error: bool = False
    """Whether the parameters of the request caused the failure."""


class Proposal(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that the draft model proposes for a row, and how much of the row it has cached."""

    token_ids: list[int]
    """Tokens that are likely to follow the row's last one; empty if its tokens are not all in the draft model's cache
    yet, if there is no room for more, or if its grammar allows none."""
    num_cached: int
    """Number of the row's first tokens that are in the draft model's cache, without the proposed ones."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Result of a step. A row is in exactly one of `rows`, `pooled`, `ended` and `failures`, or in none while its
    prompt is being computed."""

    step: int
    rows: list[int]
    """Rows that sampled, in any order."""
    token_ids: list[int]
    """Sampled tokens, in the order of `rows`."""
    logprobs: dict[int, TokenLogprobs] = {}
    """Log-probabilities by row, for the rows that asked for them."""
    checked_token_ids: dict[int, list[int]] = {}
    """Tokens that rows with drafts sampled after their first, by row. Each token but the last equals the draft."""
    checked_logprobs: dict[int, list[TokenLogprobs]] = {}
    """Log-probabilities of these tokens by row, for the rows that asked for them."""
    proposals: dict[int, Proposal] = {}
    """Proposals by row. Only rows that the plan's `proposals` names and that sampled a token in this step have one."""
    draft_passes: list[tuple[int, float]] = []
    """Number of tokens, and seconds, of each pass of the draft model in this step."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """Log-probabilities of the prompt positions computed in this step, by row, for the rows that asked for them."""
    pooled: dict[int, Array] = {}
    """float32 [size] Vector of each row whose prompt is complete, by row, with a pooling model: features of the pooled
    hidden state, or the outputs of a classifier's head."""
    mask_seconds: float = 0.0
    """Time for the masks of grammars; 0 without any."""
    ended: list[int] = []
    """Rows whose text is complete by their grammar, and for which no token is left to choose."""
    failures: list[RowFailure] = []
    routed_experts: Array | None = None
    """[tokens of the plan's `capture_rows`, in its order; num_moe_layers; top_k] The experts of each token, by the
    model's own numbers, in the smallest unsigned dtype that holds them. With several stages the first rank of each
    stage reports its own layers, and the executor joins them."""
    routed_slots: Array | None = None
    """int32 [tokens as above] The cache slots that hold these tokens' keys and values."""
    any_engine_busy: bool = False
    """Whether any engine of the expert group computed something in this step."""


class StageRoutedExperts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Routed experts of the layers of one stage that does not sample; see `StepResult.routed_experts`."""

    step: int
    routed_experts: Array


class StepBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a step that was not completed because another engine of the expert group exited. The worker is intact
    and takes no step before it has joined a group of a later epoch."""

    step: int
    cause: str


class OpenGroup(msgspec.Struct, frozen=True, tag=True):
    """Open the resources that the workers of a group need to join it, and leave that group's earlier epoch.

    The engine's own group is opened once, before the model is loaded.
    """

    name: GroupName
    epoch: int = 0
    ranks: list[int] | None = None
    """Data-parallel ranks of the engines of an expert group; None: those of the epoch before."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Join the group that was opened. `members` has the engines of the group, in order of their ranks: only the
    worker's own engine, unless it is an expert group."""

    name: GroupName
    epoch: int
    members: list[EngineOpened]
    leaving: list[int] = []
    """Data-parallel ranks of the engines whose experts move to the others."""


class GroupJoined(msgspec.Struct, frozen=True, tag=True):
    """The worker has joined an expert group and has its experts."""

    broken: str | None = None
    """Cause, if the group has broken meanwhile; then the worker takes no step before it has joined a later one."""
    shortage: str | None = None
    """Why the worker cannot take over the experts of engines that are about to leave, which then keep them."""


class ReadExpertLoad(msgspec.Struct, frozen=True, tag=True):
    """Ask for the number of tokens that each expert has had."""


class WorkerExpertLoad(msgspec.Struct, frozen=True, tag=True):
    """Numbers of tokens since the model was loaded, in the layers of this stage. Empty on ranks whose tokens another
    rank counts."""

    counts: Array
    """int64 [num_moe_layers, num_experts]"""


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Read the weights and make the model ready to compute."""

    expert_group_size: int | None = None
    """Number of engines of a running expert group that gives the worker its experts; None: it reads those of the group
    at the start."""


class ModelLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    """Maximum length in tokens: the user's option, or else the length that the model was made for."""
    bytes_per_block: int
    """Memory of one cache block over all layers of this worker."""
    device: str
    """`cpu` or `cuda`."""
    kernels: str
    """Name of the kernels that compute, the same on all workers."""
    num_moe_layers: int = 0
    """Number of layers of this stage that have experts."""
    layers_with_experts: tuple[int, ...] = ()
    """Indices of the layers that have experts, of the whole model."""
    num_layers: int = 0
    """Number of layers of the whole model."""
    num_experts: int = 0
    top_k: int = 0
    """Number of experts of a token; 0 for a model without experts."""
    hidden_size: int = 0
    """Number of features of a hidden state."""
    process: ProcessInfo | None = None


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """Measure the memory that the cache may take, beside steps of up to this many tokens."""

    max_num_batched_tokens: int


class MemoryMeasured(msgspec.Struct, frozen=True, tag=True):
    available_bytes: int
    """Memory for the cache, without the weights and the largest step."""


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    """Allocate the cache, and get ready for steps of up to `max_num_batched_tokens` tokens."""

    num_blocks: int
    max_num_batched_tokens: int


class LoadNullModel(msgspec.Struct, frozen=True, tag=True):
    """Compute nothing from now on: every row that could sample gets token 0. A step then costs only its transport."""


class SleepWorker(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Free the memory of the weights or the cache. Level 2 drops the weights; with level 1 they can be restored without
    a source. The content of the cache is lost. Parts that sleep already stay asleep."""

    tags: tuple[SleepTag, ...]
    level: int


class WorkerSlept(msgspec.Struct, frozen=True, tag=True):
    freed_bytes: int
    """Memory that was returned to the system, or to the device."""


class WakeWorker(msgspec.Struct, frozen=True, tag=True):
    """Allocate the memory of these parts again, and restore the weights. Parts that are awake stay awake."""

    tags: tuple[SleepTag, ...]


class WorkerWoke(msgspec.Struct, frozen=True, tag=True):
    """Reply to `WakeWorker`. With a failure, there is too little memory, and parts may still be asleep."""

    failure: Failure | None = None


class WriteAdapter(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read an adapter into a slot that no row uses."""

    slot: int
    path: str


class AdapterWritten(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `WriteAdapter`. With a failure, the adapter does not fit or cannot be read, and the slot is unused."""

    digest: str = ""
    failure: Failure | None = None


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True):
    """Compile a grammar beside the steps, and say whether that is done. Answered at once, and repeated until it is."""

    grammar: Grammar


class GrammarPrepared(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to `PrepareGrammar`. With a failure, no row can follow the grammar."""

    is_done: bool
    failure: Failure | None = None
    num_bytes: int = 0
    """See `CompiledGrammar.num_bytes`."""


class CallExtension(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the user's worker extension. For `arguments` see `messages.plain`."""

    method: str
    arguments: bytes


class ExtensionReturned(msgspec.Struct, frozen=True, tag=True):
    """Result or exception of the method. An exception of the user's method is not a failure of the worker."""

    value: bytes | None = None
    failure: Failure | None = None
    has_loaded_weights: bool = False
    """Whether the method has loaded weights, which the next step uses."""


WorkerCall = (
    StepPlan
    | OpenGroup
    | JoinGroup
    | LoadModel
    | LoadNullModel
    | MeasureMemory
    | AllocateCache
    | CallExtension
    | ReadExpertLoad
    | SleepWorker
    | WakeWorker
    | TransferCall
    | WriteAdapter
    | PrepareGrammar
)
WorkerReply = (
    StepResult
    | CallDone
    | GroupJoined
    | GroupOpened
    | ModelLoaded
    | MemoryMeasured
    | ExtensionReturned
    | StageRoutedExperts
    | StepBroken
    | WorkerExpertLoad
    | WorkerSlept
    | WorkerWoke
    | TransferReply
    | AdapterWritten
    | GrammarPrepared
    | Ended
)
"""`Ended` means that the call raised. The worker's state is unknown then, so its engine ends."""


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A numbered call to workers."""

    call_id: int
    body: WorkerCall


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """Reply of one worker to the call with the same number."""

    call_id: int
    """Number of the call; 0 for a report of a failure that replies to no call."""
    rank: int
    """Rank of the worker in its engine."""
    body: WorkerReply
