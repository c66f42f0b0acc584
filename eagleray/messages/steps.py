"""What an engine tells its workers, and what they answer.

A worker keeps a table of rows, one for each running request. A plan says which rows compute how many of their tokens.
It never carries a sampled token: the worker that sampled a token already has it in the row. So the plan of the next
step does not depend on the result of this one.
"""

from __future__ import annotations

import msgspec

from eagleray.identity import WorkerId
from eagleray.messages.arrays import Array
from eagleray.messages.failure import Failure
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs
from eagleray.messages.sampling import Sampling
from eagleray.messages.workers import Topology


class NewRow(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request takes a row, for the first time or again after a preemption: all that the worker must know of it."""

    row: int
    request_id: str
    token_ids: list[int]
    """The prompt, then what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """The first this many of `token_ids` are in the cache already."""
    block_ids: list[int]
    """Blocks of the cache, in order of position, enough for what this step computes."""
    sampling: Sampling
    prompt_logprobs_from: int = 1
    """First prompt position whose log-probabilities are still wanted (if `sampling.prompt_logprobs` is set)."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """One step: first `ends`, then `starts`, then `grown`, then every row of `rows` computes its next tokens.

    A row whose last known token is computed samples the next one, which becomes known. Every row named by `ends`,
    `starts` or `grown` is in a valid state after it; `rows` has no duplicates, and is empty only in an engine that
    steps together with others.
    """

    step: int
    ends: list[int]
    """Rows that are free now."""
    starts: list[NewRow]
    grown: list[tuple[int, list[int]]]
    """(row, block ids appended to its block table)."""
    rows: list[int]
    num_tokens: list[int]
    """How many of its next tokens each of `rows` computes; at least 1."""
    capture: list[int] = []
    """Those of `rows`, in their order, whose tokens' experts are to be reported."""
    is_idle: bool = False
    """Of engines that step together: this one has nothing to do, and steps for the others' sake."""

    @property
    def total_num_tokens(self) -> int:
        return sum(self.num_tokens)

    @property
    def label(self) -> str:
        """For people: which step it is, and how large."""
        return f"step {self.step} ({self.total_num_tokens} tokens in {len(self.rows)} rows)"


class RowFailure(msgspec.Struct, frozen=True):
    """This row's request cannot go on; the others are unharmed."""

    row: int
    message: str
    is_user_error: bool = False
    """The request's own parameters are to blame."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What a step produced. A row is in exactly one of `rows` and `failures`, or in neither while its prompt is
    still being computed."""

    step: int
    rows: list[int]
    """Rows that sampled, in any order."""
    token_ids: list[int]
    """The token that each of `rows` sampled."""
    logprobs: dict[int, TokenLogprobs] = {}
    """By row, for those that asked."""
    prompt_logprobs: dict[int, PromptLogprobs] = {}
    """By row, for the prompt positions computed in this step, for those that asked."""
    failures: list[RowFailure] = []
    routed_experts: Array | None = None
    """[tokens of the rows `capture` of the plan, in its order; num_moe_layers; top_k] the experts of each token, by the
    model's own numbers, in the smallest unsigned dtype that holds them. With several stages each first rank of a stage
    reports its own layers, and the executor joins them."""
    routed_slots: Array | None = None
    """int32 [tokens as above] the slots of the cache that have these tokens' keys and values."""
    any_engine_busy: bool = False
    """Of engines that step together: one of them was not idle in this step."""


class StageRoutedExperts(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """`StepResult.routed_experts` of the layers of one stage, from a stage that does not sample."""

    step: int
    routed_experts: Array


class StepBroken(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The step was not completed because another engine of the group that steps together is gone. The worker is well,
    and takes no step before it has joined a group of a later epoch."""

    step: int
    cause: str


class OpenExpertGroup(msgspec.Struct, frozen=True, tag=True):
    """Open what the engines that share experts will join. Leaves the group of an earlier epoch."""

    epoch: int


class ExpertGroupOpened(msgspec.Struct, frozen=True, tag=True):
    """How others reach what this worker has opened; None for what it has not."""

    store: str | None = None
    """`host:port` of a rendezvous store."""
    segment: bytes | None = None
    """For ranks of one node: which process this is and, from the first one, the shared memory."""


class EngineOpened(msgspec.Struct, frozen=True, kw_only=True):
    """What the workers of one engine have opened, by rank, and where they are."""

    rank: int
    """Of the engine."""
    topology: Topology
    opened: list[ExpertGroupOpened]


class JoinExpertGroup(msgspec.Struct, frozen=True, tag=True):
    """Join the group of this epoch. `members` is in order of the engines' ranks."""

    epoch: int
    members: list[EngineOpened]


class ReadExpertLoad(msgspec.Struct, frozen=True, tag=True):
    """How many tokens each expert has had."""


class WorkerExpertLoad(msgspec.Struct, frozen=True, tag=True):
    """Since the model was loaded, of the layers of this stage. Empty on ranks whose tokens others count."""

    counts: Array
    """int64 [num_moe_layers, num_experts]"""


class OpenGroups(msgspec.Struct, frozen=True, tag=True):
    """Choose the device, and open what other workers will join to compute together with this one."""


class GroupsOpened(msgspec.Struct, frozen=True, tag=True):
    """How others reach what this worker has opened; None for what it has not."""

    store: str | None = None
    """`host:port` of the rendezvous store of torch.distributed, bound by rank 0."""
    segment: bytes | None = None
    """Shared memory of a tensor-parallel group on one node, made by its first rank."""


class JoinGroups(msgspec.Struct, frozen=True, tag=True):
    """Join the groups that this worker belongs to. `opened` is indexed by rank."""

    opened: list[GroupsOpened]


class GroupsJoined(msgspec.Struct, frozen=True, tag=True):
    pass


class LoadModel(msgspec.Struct, frozen=True, tag=True):
    """Read the weights and make the model ready to compute."""


class ModelLoaded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    architecture: str
    num_parameters: int
    vocab_size: int
    max_model_len: int
    """What the user set, or else what the model was made for, in tokens."""
    bytes_per_block: int
    """Memory of one cache block over all layers of this worker."""
    device: str
    """`cpu` or `cuda`."""
    kernels: str
    """The name of the kernels that compute, the same on all workers."""
    num_moe_layers: int = 0
    """Of this stage."""
    num_experts: int = 0
    top_k: int = 0
    """Experts of a token; 0 for a model without experts."""


class MeasureMemory(msgspec.Struct, frozen=True, tag=True):
    """Find out how much memory the cache may take, beside steps of this many tokens."""

    max_num_batched_tokens: int


class MemoryMeasured(msgspec.Struct, frozen=True, tag=True):
    available_bytes: int
    """For the cache, after weights and the largest step."""


class AllocateCache(msgspec.Struct, frozen=True, tag=True):
    num_blocks: int


class CacheAllocated(msgspec.Struct, frozen=True, tag=True):
    pass


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call raised on a worker. The worker's state is unknown from here on."""

    worker: WorkerId
    cause: Failure


class LoadNullModel(msgspec.Struct, frozen=True, tag=True):
    """Compute nothing: every row that could sample answers token 0. What is left is the cost of the step's way."""


class CallExtension(msgspec.Struct, frozen=True, tag=True):
    """Call a method of the user's worker extension. `arguments`: see `messages.plain`."""

    method: str
    arguments: bytes


class ExtensionReturned(msgspec.Struct, frozen=True, tag=True):
    """What the method returned or raised; an exception of the user's method is not a failure of the worker."""

    value: bytes | None = None
    failure: Failure | None = None


WorkerCall = (
    StepPlan
    | OpenGroups
    | JoinGroups
    | LoadModel
    | LoadNullModel
    | MeasureMemory
    | AllocateCache
    | CallExtension
    | OpenExpertGroup
    | JoinExpertGroup
    | ReadExpertLoad
)
WorkerReply = (
    StepResult
    | GroupsOpened
    | GroupsJoined
    | ModelLoaded
    | MemoryMeasured
    | CacheAllocated
    | ExtensionReturned
    | StageRoutedExperts
    | StepBroken
    | ExpertGroupOpened
    | WorkerExpertLoad
    | WorkerFailure
)


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A numbered call to workers."""

    call_id: int
    body: WorkerCall


class Reply(msgspec.Struct, frozen=True, array_like=True):
    """One worker's answer to the call of that number."""

    call_id: int
    """0: an answer to no call, but news of a failure."""
    rank: int
    """Rank of the worker in its engine."""
    body: WorkerReply
