"""Cost of a step beside the model, which is a mere table of rows here: in the scheduler, and on the way to the client.

Every kind of step computes a token of each running request:

- `decode`: nothing else.
- `mixed`: in addition a long prompt takes the rest of the token budget, chunk by chunk; when it is computed, the next
  one follows.
- `routed`: all requests ask for their routed experts.
- `rollout`: also for the log-probability of each token.
- `drafted`: tokens are drafted by n-grams, and the drafts are right.
- `undrafted`: no token repeats another, so that n-grams predict none.

Times are those of the thread on its core, since the scheduler waits for nothing and other processes may share the core.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from eagleray.client.in_flight import InFlightRequests
from eagleray.client.request import ClientRequest
from eagleray.client.routing.router import Router
from eagleray.config.speculation import speculation
from eagleray.errors import UserError
from eagleray.identity import ClientId, EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.membership import EngineInfo, RoutingInfo
from eagleray.messages.outputs import Chunks, TokenLogprobs
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import Sampling, SamplingParams, Stopping
from eagleray.messages.steps import StepPlan, StepResult
from eagleray.messages.wires import CLIENT_INBOX, ENGINE_OUTBOX
from eagleray.scheduler.history_drafter import HistoryDrafter
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.step_outputs import StepOutputs
from eagleray_bench.figures import Summary, summarize

Kind = Literal["decode", "mixed", "routed", "rollout", "drafted", "undrafted"]

KINDS: tuple[Kind, ...] = ("decode", "mixed", "routed", "rollout", "drafted", "undrafted")

CLIENT = ClientId("bench", 0)
ENGINE = EngineId("bench", 0)
ROUTING = RoutingInfo(num_layers=24, num_experts=64, top_k=8)
SPECULATION = speculation({"method": "ngram", "num_speculative_tokens": 4})
BLOCK_SIZE = 16
PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 2048
MIN_BUDGET = 512
CHUNK_TOKENS = 256
"""Least part of the token budget that the running requests leave to a long prompt."""
WARM_UP = 50
PERIOD = 32
"""Number of tokens after which those of a row repeat, unless the kind is `undrafted`."""
VOCAB_SIZE = 2**20
STEP_SECONDS, TOKEN_SECONDS = 10e-3, 20e-6
"""Time of a step that the drafter is told, and of each token in it: further tokens are cheap, so that drafts pay."""


class StepTimes(NamedTuple):
    """Seconds of CPU time of the parts of a step."""

    plan: float
    apply: float
    send: float
    """Making and encoding the message to the client."""
    receive: float
    """Decoding it, and delivering its tokens to their requests."""


class SchedulingFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of CPU time per step."""

    kind: str
    num_requests: int
    num_tokens: float
    """Mean number of tokens that a step generates."""
    plan_us: Summary
    apply_us: Summary
    both_us: Summary
    """Plan and apply, which is all that the scheduler does."""
    send_us: Summary
    receive_us: Summary


def measure_scheduling(
    *, num_requests: Sequence[int], steps: int, kinds: Sequence[str] = KINDS
) -> Iterator[SchedulingFigures]:
    """Measure each kind with each number of requests. Raises `UserError` for numbers below 1."""
    if steps < 1 or min(num_requests) < 1:
        raise UserError("--steps and --requests must be at least 1")
    for kind in kinds:
        for count in num_requests:
            yield _measure(kind, count, steps)


def _measure(kind: str, num_requests: int, steps: int) -> SchedulingFigures:
    run = EndlessRequests(kind, num_requests, num_steps=steps + WARM_UP)
    for _ in range(WARM_UP):
        run.step()
    num_before = run.num_generated
    times = np.array([run.step() for _ in range(steps)])  # [steps, parts]
    plan, apply, send, receive = times.T
    return SchedulingFigures(
        kind=kind,
        num_requests=num_requests,
        num_tokens=(run.num_generated - num_before) / steps,
        plan_us=_microseconds(plan),
        apply_us=_microseconds(apply),
        both_us=_microseconds(plan + apply),
        send_us=_microseconds(send),
        receive_us=_microseconds(receive),
    )


def _microseconds(seconds: np.ndarray[Any, np.dtype[np.float64]]) -> Summary:
    summary = summarize(seconds.tolist(), scale=1e6)
    assert summary is not None
    return summary


class EndlessRequests:
    """A scheduler with `num_requests` running requests that do not finish within `num_steps`, and their client."""

    def __init__(self, kind: str, num_requests: int, *, num_steps: int) -> None:
        self._is_mixed = kind == "mixed"
        self._routing = ROUTING if kind in ("routed", "rollout") else None
        self._logprobs = 0 if kind == "rollout" else None
        drafter = HistoryDrafter(SPECULATION) if kind in ("drafted", "undrafted") and SPECULATION else None
        budget = max(MIN_BUDGET, num_requests + CHUNK_TOKENS)
        start_steps = 2 + num_requests * PROMPT_TOKENS // (budget - num_requests)
        most_tokens = 1 if drafter is None or SPECULATION is None else 1 + SPECULATION.num_speculative_tokens
        max_model_len = max(PROMPT_TOKENS + (start_steps + num_steps) * most_tokens, LONG_PROMPT_TOKENS) + 1
        num_blocks = (num_requests + 2) * -(-max_model_len // BLOCK_SIZE)
        self._num_tokens = max_model_len - PROMPT_TOKENS
        self._scheduler = Scheduler(
            max_num_seqs=num_requests + 1,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            enable_prefix_caching=True,
            policy="fcfs",
            routing=self._routing,
            drafter=drafter,
        )
        self.model = RowCounter(self._routing, has_logprobs=self._logprobs is not None, repeats=kind != "undrafted")
        self._client = ReceivingClient(
            self._scheduler,
            EngineInfo(
                architecture="none",
                vocab_size=VOCAB_SIZE,
                max_model_len=max_model_len,
                block_size=BLOCK_SIZE,
                num_kv_blocks=num_blocks,
                routing=self._routing,
            ),
        )
        self._engine_codec: Codec[Any] = Codec(ENGINE_OUTBOX)
        self._num_added = 0
        for _ in range(num_requests):
            self._add(PROMPT_TOKENS, self._num_tokens)
        while self._scheduler.stats().num_waiting:  # all requests run before the clock does
            self.step(start=True)

    @property
    def num_generated(self) -> int:
        """Number of tokens that were generated so far."""
        return self._scheduler.stats().num_generation_tokens

    def step(self, *, start: bool = False) -> StepTimes:
        """Run a step and return its times. `start`: add no long prompt yet."""
        if self._is_mixed and not start and not self.model.has_prompt:
            self._add(LONG_PROMPT_TOKENS, 1)
        began = time.thread_time()
        plan = self._scheduler.plan()
        planned = time.thread_time()
        assert plan is not None, "there is always a running request"
        result = self.model.execute(plan)
        seconds = STEP_SECONDS + TOKEN_SECONDS * plan.total_num_tokens
        resumed = time.thread_time()
        outputs = self._scheduler.apply(result, seconds=seconds)
        applied = time.thread_time()
        frames = self._encode(outputs)
        sent = time.thread_time()
        for message in frames:
            self._client.receive(message)
        return StepTimes(planned - began, applied - resumed, sent - applied, time.thread_time() - sent)

    def _encode(self, outputs: StepOutputs) -> list[list[Any]]:
        return [self._engine_codec.encode(message) for message in outputs.messages(ENGINE).values()]

    def _add(self, num_tokens: int, max_tokens: int) -> None:
        """Add a request whose prompt differs from all others from its first token on, so that the cache has no hit."""
        self._num_added += 1
        self._client.send(
            Generate(
                request_id=str(self._num_added),
                client=CLIENT,
                prompt_token_ids=[self._num_added] * num_tokens,
                sampling=Sampling(seed=0, logprobs=self._logprobs),
                stopping=Stopping(max_tokens=max_tokens),
                routed_experts_from=None if self._routing is None else 0,
            ),
            self._routing,
        )


class ReceivingClient:
    """The client of a scheduler: its requests, which nobody reads."""

    def __init__(self, scheduler: Scheduler, info: EngineInfo) -> None:
        self._scheduler = scheduler
        self._codec: Codec[Any] = Codec(CLIENT_INBOX)
        self._requests = InFlightRequests(CLIENT, router=Router(rng=random.Random(0)), send=self._pass_on)
        self._requests.on_engine_joined(ENGINE, info)

    def send(self, message: Generate, routing: RoutingInfo | None) -> None:
        """Send a request to the scheduler."""
        params = SamplingParams(
            return_routed_experts=routing is not None, logprobs=message.sampling.logprobs, detokenize=False
        )
        self._requests.start(ClientRequest(message.request_id, [message], params, routing=routing))

    def receive(self, frames: list[Any]) -> None:
        """Decode the output of a step and deliver it."""
        message = self._codec.decode(frames)
        assert isinstance(message, Chunks)
        self._requests.deliver(message)

    def _pass_on(self, engine: EngineId, message: Generate | Abort) -> None:
        assert isinstance(message, Generate)
        self._scheduler.add(message)


class RowCounter:
    """The rows of a worker without a model: a row whose tokens are all computed samples one, and one more for each
    draft that is right."""

    def __init__(self, routing: RoutingInfo | None, *, has_logprobs: bool, repeats: bool) -> None:
        self._routing = routing
        self._has_logprobs = has_logprobs
        self._repeats = repeats
        self._num_computed: dict[int, int] = {}
        self._num_known: dict[int, int] = {}
        self._prompts: set[int] = set()

    @property
    def has_prompt(self) -> bool:
        """Whether a row has not sampled yet."""
        return bool(self._prompts)

    def execute(self, plan: StepPlan) -> StepResult:
        for row in plan.freed_rows:
            del self._num_computed[row], self._num_known[row]
        for start in plan.new_rows:
            self._num_computed[start.row] = start.num_computed_tokens
            self._num_known[start.row] = len(start.token_ids)
            self._prompts.add(start.row)
        for row, token_ids in plan.settled_rows:
            self._num_known[row] += len(token_ids)
            self._num_computed[row] = self._num_known[row] - 1
        rows, sampled, checked = [], [], {}
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            drafts = plan.drafts.get(row, [])
            self._num_computed[row] += num_tokens - len(drafts)
            if self._num_computed[row] < self._num_known[row]:
                continue
            self._prompts.discard(row)
            rows.append(row)
            sampled.append(self._token(row, self._num_known[row]))
            if drafts:
                checked[row] = self._check(row, drafts, sampled[-1])
            else:
                self._num_known[row] += 1
        logprobs = {}
        if self._has_logprobs:
            logprobs = {row: TokenLogprobs([one], [-1.0], 1) for row, one in zip(rows, sampled, strict=True)}
        result = StepResult(step=plan.step, rows=rows, token_ids=sampled, checked_token_ids=checked, logprobs=logprobs)
        return result if self._routing is None else self._with_experts(plan, result)

    def _check(self, row: int, drafts: Sequence[int], token_id: int) -> list[int]:
        """Return the tokens behind the first that a step samples by these drafts."""
        checked: list[int] = []
        for drafted in drafts:
            if drafted != token_id:
                break
            token_id = self._token(row, self._num_known[row] + len(checked) + 1)
            checked.append(token_id)
        return checked

    def _token(self, row: int, position: int) -> int:
        if self._repeats:
            return 1 + position % PERIOD
        return (row * 7919 + position * 104729) * 2654435761 % VOCAB_SIZE

    def _with_experts(self, plan: StepPlan, result: StepResult) -> StepResult:
        assert self._routing is not None
        num_tokens = sum(
            count for row, count in zip(plan.rows, plan.num_tokens, strict=True) if row in plan.capture_rows
        )
        shape = (num_tokens, self._routing.num_layers, self._routing.top_k)
        return msgspec.structs.replace(
            result,
            routed_experts=np.ones(shape, self._routing.dtype),
            routed_slots=np.arange(num_tokens, dtype=np.int32),
        )
