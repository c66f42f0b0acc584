"""The scheduler: which request computes how many tokens in the next step, in which blocks of the cache.

Owns every request of the engine, the rows of the workers' tables and the blocks. The engine's core drives it: `add` and
`abort` as clients ask, `plan` before a step, `apply` with its result. Several steps may be planned before the first is
applied; results come back in the order of the plans. Where engines step together, there are also idle steps, and when
one of the others is lost the steps in flight are dropped: `rewind`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import asdict
from typing import Literal

from eagleray.errors import ConfigError, InvalidRequest
from eagleray.identity import ClientId
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate
from eagleray.messages.steps import RowFailure, StepPlan, StepResult
from eagleray.scheduler.admission import NUM_TOKEN_IDS
from eagleray.scheduler.kv_cache_manager import KVCacheManager
from eagleray.scheduler.quarantine import Quarantine
from eagleray.scheduler.queues import WaitingQueue
from eagleray.scheduler.request import AddressedChunk, Request, Run, new_request
from eagleray.scheduler.routed_experts import RoutedExpertsStore
from eagleray.scheduler.rows import RowTable
from eagleray.scheduler.stats import Counters, SchedulerStats
from eagleray.scheduler.step_draft import InFlightStep, StepDraft


class Scheduler:
    """Continuous batching over one token budget: what runs goes on first, then what waits is started.

    With pipeline stages, running requests take turns: as many steps as there are stages compute different ones, so that
    every stage has something to do. `routing`: requests may ask for the routed experts of the model.

    Raises `ConfigError` if the cache cannot hold one sequence of `max_model_len` tokens.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        enable_prefix_caching: bool,
        policy: Literal["fcfs", "priority"],
        num_stages: int = 1,
        vocab_size: int = NUM_TOKEN_IDS,
        routing: RoutingInfo | None = None,
    ) -> None:
        if num_blocks * block_size < max_model_len:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_size} tokens, but one sequence of `max_model_len` "
                f"{max_model_len} tokens must fit: give it {-(-max_model_len // block_size)} blocks, or set "
                f"`max_model_len` to at most {num_blocks * block_size}"
            )
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._num_stages = num_stages
        self._has_priorities = policy == "priority"
        self._cache = KVCacheManager(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._routed: RoutedExpertsStore | None = None
        if routing is not None:
            num_findable = num_blocks if enable_prefix_caching else 0
            self._routed = RoutedExpertsStore(routing, num_blocks=num_findable, block_size=block_size)
        self._requests: dict[tuple[ClientId, str], Request] = {}
        self._waiting = WaitingQueue()
        self._suspects = Quarantine()
        self._running = RowTable(max_num_seqs)
        self._in_flight: deque[InFlightStep] = deque()
        self._next_step = 0
        self._is_rewound = False  # and no plan was made since
        self._num_arrivals = 0
        self._notices: list[AddressedChunk] = []
        self._counters = Counters()

    @property
    def has_work(self) -> bool:
        """A request wants tokens, or a planned step was not applied yet."""
        return bool(self._requests or self._in_flight)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + len(self._suspects),
            num_kv_blocks=self._cache.num_blocks,
            num_free_kv_blocks=self._cache.num_free_blocks,
            **asdict(self._counters),
        )

    # Requests come and go.

    def add(self, request: Generate) -> None:
        """Take a request in, from its beginning or from where another engine has left it. Raises `InvalidRequest` for
        what can never run."""
        key = request.client, request.request_id
        if key in self._requests:
            raise InvalidRequest(
                f"request id {request.request_id!r} is in use: the ids of a client's running requests must be unique",
                param="request_id",
            )
        priority = request.priority if self._has_priorities else 0
        state = new_request(
            request,
            priority=priority,
            arrival=self._num_arrivals,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            has_routing=self._routed is not None,
        )
        self._num_arrivals += 1
        self._requests[key] = state
        (self._suspects if state.is_suspect else self._waiting).push(state)

    def abort(self, client: ClientId, request_ids: Iterable[str]) -> list[AddressedChunk]:
        """End these requests: a last chunk for each that was here."""
        found = [
            self._requests[client, name] for name in dict.fromkeys(request_ids) if (client, name) in self._requests
        ]
        for request in found:
            self._remove(request)
        return [request.answer(finish_reason=FinishReason.ABORT) for request in found]

    def abort_client(self, client: ClientId) -> int:
        """The client is gone: end its requests without a word. How many there were."""
        found = [request for request in self._requests.values() if request.client == client]
        for request in found:
            self._remove(request)
        return len(found)

    # One step.

    def plan(self) -> StepPlan | None:
        """The next step. None: nothing to compute, or nothing before a step in flight is applied."""
        draft = StepDraft(self._max_num_batched_tokens)
        if self._is_rewound:
            draft.starts = {run: run.row_start() for run in self._running}
        self._continue_running(draft)
        if not draft.is_short_of_blocks:
            self._start_waiting(draft)
        return self._issue(draft) if draft.num_tokens else None

    def idle_plan(self) -> StepPlan:
        """A step in which this engine computes nothing, for the sake of engines that step together with it."""
        plan = StepPlan(step=self._next_step, ends=[], starts=[], grown=[], rows=[], num_tokens=[], is_idle=True)
        self._in_flight.append(InFlightStep(plan.step))
        self._next_step += 1
        return plan

    def pop_early_chunks(self) -> list[AddressedChunk]:
        """Chunks that clients must have been sent before the last plan is carried out: they name the requests that it
        starts, as far as clients asked for that."""
        notices, self._notices = self._notices, []
        return notices

    def apply(self, result: StepResult) -> list[AddressedChunk]:
        """What the oldest step in flight produced. Rows whose request ended or was preempted since are dropped."""
        flight = self._in_flight.popleft()
        assert flight.step == result.step, f"step {flight.step} is next to be applied, not {result.step}"
        self._counters.num_steps += 1
        tokens = dict(zip(result.rows, result.token_ids, strict=True))
        failures = {failure.row: failure for failure in result.failures}
        news = [b""] * len(flight.runs) if self._routed is None else self._routed.store(result, flight.runs)
        outputs: list[AddressedChunk] = []
        for run, routed in zip(flight.runs, news, strict=True):
            if run.row in failures:
                # Held until here even if the run is over. What a failed row wrote is not to be trusted.
                self._cache.forget(run.block_ids)
            if not run.is_current:
                continue
            if run.row in failures:
                outputs.append(self._fail(run, failures[run.row], routed))
            elif run.row in tokens or run.row in result.prompt_logprobs or routed:
                outputs.append(self._deliver(run, tokens.get(run.row), result, routed))
        self._release(flight)
        return outputs

    def rewind(self) -> None:
        """Drop the steps in flight as if they had never been planned: there will be no results of them. Whatever the
        workers have made of them, the next plan starts every row anew."""
        dropped, self._in_flight = self._in_flight, deque()
        runs = dict.fromkeys(run for flight in dropped for run in flight.runs)
        for run in runs:
            run.retreat(sum(flight.runs.get(run, 0) for flight in dropped))
            self._cache.revoke(run)
        for run in runs:
            if run.is_current and run.first_step >= dropped[0].step:
                self._preempt(run)  # it may have found blocks that are not computed after all
        for flight in dropped:
            self._release(flight)
        self._running.end_all()
        self._is_rewound = True

    # What plan() is made of.

    def _continue_running(self, draft: StepDraft) -> None:
        turn = -(-len(self._running) // self._num_stages)
        for run in list(self._running):
            if len(draft.num_tokens) == turn:
                break
            if self._is_between_stages(run):
                continue
            num_tokens = min(run.num_uncomputed_tokens, draft.budget)
            if num_tokens > 0 and run.is_current and self._reserve(run, num_tokens, draft):
                draft.add(run, num_tokens)
        # Only now is it certain that none of them is preempted after all.
        for run, num_tokens in draft.num_tokens.items():
            self._advance(run, num_tokens)

    def _is_between_stages(self, run: Run) -> bool:
        """Its next token is being computed by a step that has not left the pipeline: to plan for it would only have the
        first stage wait for the last one."""
        if run.num_placeholders == 0 or not self._in_flight:
            return False
        return run.last_step >= max(self._in_flight[0].step, self._next_step - (self._num_stages - 1))

    def _reserve(self, run: Run, num_tokens: int, draft: StepDraft) -> bool:
        """Get the blocks for the next `num_tokens` tokens, at the expense of less urgent requests if need be."""
        while (added := self._cache.grow(run, run.num_computed_tokens + num_tokens)) is None:
            draft.is_short_of_blocks = True
            if any(flight.block_tables for flight in self._in_flight):
                return False  # blocks come back with a step in flight: wait for those before taking more
            victim = self._running.least_urgent()
            self._preempt(victim)
            draft.drop(victim)
            if victim is run:
                return False
        if added:
            draft.grown[run] = added
        return True

    def _start_waiting(self, draft: StepDraft) -> None:
        if (suspect := self._suspects.next(self._in_flight)) is not None:
            self._waiting.push(suspect)
        while self._waiting and self._running.has_free and draft.budget > 0:
            request = self._waiting.first()
            cached = self._cache.lookup(request)
            # Room for all of it, although a first chunk needs less: else it would soon be preempted for the rest.
            if not self._cache.can_hold(len(request.token_ids), cached=cached):
                break
            self._start(self._waiting.pop(), cached, draft)

    def _start(self, request: Request, cached: list[int], draft: StepDraft) -> None:
        num_cached = len(cached) * self._cache.block_size
        num_tokens = min(len(request.token_ids) - num_cached, draft.budget)
        run = self._running.start(
            request,
            block_ids=self._cache.start(num_cached + num_tokens, cached=cached),
            num_cached_tokens=num_cached,
            num_cached_blocks=len(cached),
            step=self._next_step,
        )
        draft.starts[run] = run.row_start()
        draft.add(run, num_tokens)
        if not request.was_started:
            self._count_lookup(request, num_cached)
            if request.announce_start:
                self._notices.append(
                    AddressedChunk(request.client, Chunk(request_id=request.request_id, is_started=True))
                )
        self._advance(run, num_tokens)

    def _advance(self, run: Run, num_tokens: int) -> None:
        num_prompt_tokens = run.request.num_prompt_tokens - run.num_computed_tokens
        self._counters.num_prompt_tokens += max(0, min(num_tokens, num_prompt_tokens))
        run.advance(num_tokens, step=self._next_step)
        self._cache.commit(run)

    def _count_lookup(self, request: Request, num_cached: int) -> None:
        request.was_started = True
        request.num_cached_tokens = num_cached = min(num_cached, request.num_prompt_tokens)
        if self._cache.enable_prefix_caching and request.num_readable_tokens > 0:
            self._counters.num_prefix_queries += request.num_prompt_tokens
            self._counters.num_prefix_hits += num_cached

    def _issue(self, draft: StepDraft) -> StepPlan:
        plan = StepPlan(
            step=self._next_step,
            ends=self._running.pop_freed_rows(),
            starts=list(draft.starts.values()),
            grown=[(run.row, added) for run, added in draft.grown.items()],
            rows=[run.row for run in draft.num_tokens],
            num_tokens=list(draft.num_tokens.values()),
            capture=[run.row for run in draft.num_tokens if run.request.routed_experts_from is not None],
        )
        self._in_flight.append(InFlightStep(self._next_step, draft.num_tokens))
        self._next_step += 1
        self._is_rewound = False
        return plan

    def _preempt(self, run: Run) -> None:
        """Back to the waiting ones, with its tokens but nothing computed."""
        self._leave_row(run)
        self._waiting.push(run.request)
        self._counters.num_preemptions += 1

    # What apply() is made of.

    def _deliver(self, run: Run, token_id: int | None, result: StepResult, routed: bytes) -> AddressedChunk:
        """The chunk for what a step produced for one request, which may end with it."""
        request = run.request
        prompt_logprobs = result.prompt_logprobs.get(run.row)
        if prompt_logprobs is not None:
            assert prompt_logprobs.start == request.prompt_logprobs_from, "prompt logprobs come once and in order"
            request.prompt_logprobs_from += len(prompt_logprobs.ranks)
        if token_id is None:
            return request.answer(prompt_logprobs=prompt_logprobs, routed_experts=routed)
        self._counters.num_generation_tokens += 1
        run.num_placeholders -= 1
        finish = request.append(token_id)
        self._cache.commit(run)
        if finish is not None:
            self._remove(request)
        return request.answer(
            token_ids=[token_id],
            logprobs=[result.logprobs[run.row]] if run.row in result.logprobs else [],
            prompt_logprobs=prompt_logprobs,
            routed_experts=routed,
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
        )

    def _fail(self, run: Run, failure: RowFailure, routed: bytes) -> AddressedChunk:
        self._remove(run.request)
        return run.request.answer(
            finish_reason=FinishReason.ERROR,
            error=failure.message,
            is_user_error=failure.is_user_error,
            routed_experts=routed,
        )

    # Ends.

    def _remove(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        del self._requests[request.client, request.request_id]
        was_held_back = request.is_suspect and self._suspects.end(request)
        if request.run is not None:
            self._leave_row(request.run)
        elif not was_held_back:
            self._waiting.remove(request)

    def _leave_row(self, run: Run) -> None:
        """The run is over. Its blocks are free at once, or when the last step in flight that names them is applied."""
        self._running.end(run)
        if self._in_flight and run.last_step >= self._in_flight[0].step:
            self._in_flight[run.last_step - self._in_flight[0].step].block_tables.append(run.block_ids)
        else:
            self._cache.release(run.block_ids)

    def _release(self, flight: InFlightStep) -> None:
        """The step is done with the blocks of runs that are over."""
        for block_ids in flight.block_tables:
            self._cache.release(block_ids)
