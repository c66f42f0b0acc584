"""The scheduler decides which request computes how many tokens in the next step, in which blocks of the cache.

It owns every request of the engine, the rows of the workers' tables and the blocks. The engine core drives it: `add`
and `abort` as clients ask, `plan` before a step, `apply` with its result. Several steps may be planned before the first
is applied; results come back in the order of the plans. In an expert group there are also idle steps (`idle_plan`), and
when another engine of the group exits, the steps in flight are dropped (`rewind`).

Planning can be stopped and started again (`stop`, `drain`, `start`). Requests keep their rows and blocks meanwhile,
unless `preempt_all` takes them. Methods that change weights or the cache are called between steps, when
`is_settled`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any, Literal

import msgspec

from eagleray.config.speculation import MAX_DRAFT_TOKENS
from eagleray.errors import ConfigError, InvalidRequest
from eagleray.identity import FIRST_WEIGHT_VERSION, ClientId
from eagleray.messages.arrays import Array
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import PARAM, Grammar
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import FinishReason, SchedulerStats
from eagleray.messages.requests import Generate
from eagleray.messages.steps import RowFailure, StepPlan, StepResult
from eagleray.scheduler.adapters import AdapterSlots
from eagleray.scheduler.admission import NUM_TOKEN_IDS
from eagleray.scheduler.kv_cache_manager import KVCacheManager
from eagleray.scheduler.model_drafter import Asking, ModelDrafter
from eagleray.scheduler.prepared_grammars import PreparedGrammars
from eagleray.scheduler.request import Request, Run, new_request
from eagleray.scheduler.routed_experts import RoutedExpertsStore
from eagleray.scheduler.running import InFlightStep, RowTable, StepDraft
from eagleray.scheduler.speculation import Candidate, Drafter
from eagleray.scheduler.step_outputs import AddressedChunk, DetailedToken, StepOutputs
from eagleray.scheduler.timings import Counters, EngineHistograms
from eagleray.scheduler.waiting import Backlog

LEAST_GAIN_OF_WAITING = 0.1
"""Gain in speed by drafts for which a step is not planned ahead of the one before."""

LEAST_GAIN_OF_TURN = 0.5
"""Gain in speed by a draft for which a run gives up its turn in the pipeline, until its last token is known."""


COUNTED_STEPS = 4
"""Number of steps without drafts of which one is counted and stands for all, to spare the scheduler's time."""


class Scheduler:
    """Continuous batching over one token budget: running requests come first, then waiting ones are admitted.

    Where the budget has a token for each running request, a prompt gets only what these tokens leave of it. With
    pipeline stages, running requests take turns: each of the steps in flight computes different requests, so that
    every stage has work. If `routing` is given, requests may ask for the routed experts of the model. If `pools`, each
    request finishes with the vector that the step of its last prompt token reports. With `drafter`, steps check
    drafts of tokens.

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
        num_adapter_slots: int = 0,
        pools: bool = False,
        drafter: Drafter[Any] | None = None,
    ) -> None:
        if num_blocks * block_size < max_model_len:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks of {block_size} tokens, but one sequence of `max_model_len` "
                f"{max_model_len} tokens must fit: give it {-(-max_model_len // block_size)} blocks, or set "
                f"`max_model_len` to at most {num_blocks * block_size}"
            )
        self.adapters = AdapterSlots(num_adapter_slots)
        """Adapters that requests may name. `engine.adapters` has the workers load them."""
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._num_stages = num_stages
        self._pools = pools
        self._has_priorities = policy == "priority"
        self._cache = KVCacheManager(
            num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
        )
        self._routed: RoutedExpertsStore | None = None
        if routing is not None:
            num_findable = num_blocks if enable_prefix_caching else 0
            self._routed = RoutedExpertsStore(routing, num_blocks=num_findable, block_size=block_size)
        self._requests: dict[tuple[ClientId, str], Request] = {}
        self._clients: dict[ClientId, ClientId] = {}
        """One object for each client, so that requests of one client are told by its identity, which takes no time."""
        self._waiting = Backlog()
        self._running = RowTable(max_num_seqs)
        self._in_flight: deque[InFlightStep] = deque()
        self._next_step = 0
        self._is_rewound = False  # True from `rewind` to the next plan that is not idle
        self._is_stopped = False
        self._update = 0
        self._num_loads = 0
        self._weight_version = FIRST_WEIGHT_VERSION
        self._num_arrivals = 0
        self._grammars = PreparedGrammars()
        self._early_chunks: list[AddressedChunk] = []
        self._drafter = drafter
        self._model_drafter = drafter if isinstance(drafter, ModelDrafter) else None
        self._counters = Counters()
        self._histograms = EngineHistograms()

    @property
    def has_work(self) -> bool:
        """Whether requests can be computed, or a planned step has not been applied yet."""
        may_plan = not self._is_stopped and (len(self._running) or self._waiting.may_admit)
        return bool(self._in_flight or may_plan)

    @property
    def may_plan(self) -> bool:
        """Whether steps may be planned, see `stop`."""
        return not self._is_stopped

    @property
    def num_requests(self) -> int:
        """Number of requests that have not finished."""
        return len(self._requests)

    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_running=len(self._running),
            num_constrained=sum(run.request.sampling.grammar is not None for run in self._running),
            num_waiting=len(self._waiting),
            num_kv_blocks=self._cache.num_blocks,
            num_free_kv_blocks=self._cache.num_free_blocks,
            update=self._update,
            num_deferred=len(self._waiting) if self._is_stopped else self._waiting.num_deferred,
            running_adapters=self.adapters.running,
            waiting_adapters=self.adapters.waiting,
            distributions=self._histograms.report(),
            accepted_by_position=[] if self._drafter is None else list(self._drafter.num_accepted),
            **asdict(self._counters),
        )

    # Requests are added and aborted.

    def add(self, request: Generate) -> None:
        """Queue a request, which starts from its prompt or resumes from the tokens that another engine generated.

        Raises `InvalidRequest` if it can never run.
        """
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
            pools=self._pools,
            update=self._update,
            num_loads=self._num_loads,
            adapter=self.adapters.find(request.adapter, request.adapter_number) if request.adapter else None,
        )
        state.client = self._clients.setdefault(state.client, state.client)
        if state.adapter is not None:
            self.adapters.retain(state.adapter)
        self._num_arrivals += 1
        self._requests[key] = state
        self._queue(state)

    @property
    def has_unprepared_grammars(self) -> bool:
        """Whether requests wait for the workers to compile their grammars."""
        return self._waiting.has_unprepared

    def first_unprepared_grammars(self, limit: int) -> list[Grammar]:
        """Return up to `limit` grammars that the workers have to compile before the requests that use them run."""
        return self._waiting.first_unprepared(limit)

    def is_awaited(self, grammar: Grammar) -> bool:
        """Whether requests wait for this grammar."""
        return self._waiting.is_awaited(grammar)

    def announce_starts(self, grammars: Iterable[Grammar]) -> list[AddressedChunk]:
        """Return the chunks that clients must receive before the workers compile these grammars, since one may crash
        them. One request of each grammar is announced, so that the others are not charged with an exit."""
        waiting = (self._waiting.unprepared(grammar) for grammar in grammars)
        firsts = (next((one for one in requests if one.announce_start), None) for requests in waiting)
        return [request.make_start_chunk() for request in firsts if request is not None]

    def on_grammar_prepared(
        self, grammar: Grammar, failure: Failure | None, *, seconds: float, num_bytes: int = 0
    ) -> list[AddressedChunk]:
        """Let the requests with this grammar run, or fail. Returns their last chunks then. `seconds`: since the workers
        were asked. `num_bytes`: see `GrammarPrepared`."""
        self._histograms.on_grammar_compiled(seconds)
        requests = self._waiting.pop_unprepared(grammar)
        for request in requests:
            self._waiting.push(request)
        if failure is None:
            self._grammars.add(grammar, num_bytes)
            return []
        return [self._refuse(request, failure) for request in requests]

    def abort(self, client: ClientId, request_ids: Iterable[str]) -> list[AddressedChunk]:
        """Abort these requests and return a last chunk for each that exists."""
        found = [
            self._requests[client, name] for name in dict.fromkeys(request_ids) if (client, name) in self._requests
        ]
        return self._abort(found)

    def abort_all(self) -> list[AddressedChunk]:
        """Abort all requests and return a last chunk for each."""
        return self._abort(list(self._requests.values()))

    def abort_client(self, client: ClientId) -> int:
        """Abort all requests of a client that has left, without chunks, and return their number."""
        self._clients.pop(client, None)
        return len(self._abort([request for request in self._requests.values() if request.client == client]))

    # Stop and start of planning, changes of weights and cache.

    @property
    def is_settled(self) -> bool:
        """Whether no step of a request is in flight."""
        return not any(flight.runs for flight in self._in_flight)

    @property
    def is_drained(self) -> bool:
        """Whether no request is under way. After `drain`, requests that have not begun are held back."""
        return not self._running and not self._waiting.has_underway

    def stop(self) -> None:
        """Plan no steps until `start`."""
        self._is_stopped = True

    def drain(self) -> None:
        """Plan only steps of requests that are under way, until `start`."""
        self._is_stopped = False
        self._waiting.hold_back()

    def start(self) -> None:
        """Plan steps of all requests."""
        self._is_stopped = False
        self._waiting.release()

    def preempt_all(self) -> None:
        """Take the rows and blocks of all running requests, which are then computed again."""
        assert self.is_settled, "steps in flight use the blocks"
        for run in list(self._running):
            self._preempt(run)

    def reset_prefix_cache(self) -> bool:
        """Empty the prefix cache. Returns False, and changes nothing, if a request or a step in flight has blocks."""
        return self._cache.clear()

    def set_weights(self, *, update: int, version: str) -> None:
        """Adopt the number of the last update and the version of the weights that compute the next steps.

        With a new number, requests whose row has sampled no token yet start their prompt again. The others continue
        with their blocks, and no other request finds the blocks that they compute from now on.
        """
        self._weight_version = version
        for run in self._running:
            run.steady_until = 0  # the next output of each request may have to name the version
        if update == self._update:
            return
        assert self.is_settled, "a step in flight would be counted for the wrong weights"
        self._update = update
        for run in list(self._running):
            if run.has_sampled:
                run.is_cacheable = False
            else:
                self._preempt(run)
        self._leave_cached_blocks()

    def on_weights_loaded(self) -> None:
        """Hide all cached blocks from later lookups, because a method of the workers has loaded weights.

        Running requests continue with their blocks, and no other request finds the blocks that they compute from now
        on. Steps may be in flight: their blocks are not found either.
        """
        self._num_loads += 1
        for run in self._running:
            run.is_cacheable = False
        self._leave_cached_blocks()

    def _leave_cached_blocks(self) -> None:
        for request in self._requests.values():
            request.set_update(self._update, self._num_loads)

    # One step.

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next step waits until a step in flight is applied, because more is gained by drafts, which need
        its tokens, than by planning ahead."""
        if self._drafter is None or self._num_stages > 1 or not any(flight.runs for flight in self._in_flight):
            return False
        if self._drafting_runs():
            return True  # a step would go without them
        candidates = [
            candidate
            for run in self._running
            if (candidate := self._candidate(run, self._drafter)) is not None and run.num_placeholders
        ]
        if not candidates:
            return False
        return self._drafter.gain_of_waiting(candidates, num_rows=len(self._running)) > LEAST_GAIN_OF_WAITING

    def plan(self) -> StepPlan | None:
        """Plan the next step. Returns None if nothing can be computed before a step in flight is applied, or planning
        is stopped."""
        if self._is_stopped:
            return None
        draft = StepDraft(self._max_num_batched_tokens)
        if self._is_rewound:
            draft.new_rows = {run: run.new_row() for run in self._running}
        self._continue_running(draft)
        if not draft.is_short_of_blocks:
            self._admit_waiting(draft)
            if self._model_drafter is not None:
                self._choose_proposals(draft, self._model_drafter)
        return self._make_plan(draft) if draft.num_tokens else None

    def idle_plan(self) -> StepPlan:
        """Plan a step without work, which the engine takes because the other engines of its expert group do."""
        plan = StepPlan(
            step=self._next_step, freed_rows=[], new_rows=[], new_blocks=[], rows=[], num_tokens=[], is_idle=True
        )
        self._in_flight.append(InFlightStep(plan.step, self._weight_version))
        self._next_step += 1
        return plan

    def pop_early_chunks(self) -> list[AddressedChunk]:
        """Return the chunks to send before the last plan is executed: they name the requests that it starts, for the
        clients that asked to be notified."""
        early_chunks, self._early_chunks = self._early_chunks, []
        return early_chunks

    def apply(self, result: StepResult, *, seconds: float | None = None) -> StepOutputs:
        """Apply the result of the oldest step in flight and return its output. `seconds`: time that the step took.

        Rows whose request finished or was preempted in the meantime are dropped.
        """
        flight = self._in_flight.popleft()
        assert flight.step == result.step, f"step {flight.step} is next to be applied, not {result.step}"
        self._counters.num_steps += 1
        self._histograms.on_step(flight.num_tokens)
        self._histograms.on_masks(result.mask_seconds)
        for run in flight.proposals:
            run.is_proposing = False
        is_counted = flight.drafts or flight.proposals or flight.step % COUNTED_STEPS == 0
        if self._drafter is not None and seconds is not None and is_counted:
            self._count_step(self._drafter, flight, result, seconds - _draft_seconds(result))
            if self._model_drafter is not None and result.draft_passes:
                self._model_drafter.on_passes(result.draft_passes, num_rows=len(result.rows))
        outputs = StepOutputs()
        others = self._append_tokens(flight, result, outputs)
        if others:
            outputs.add(self._make_chunks(others, flight, result))
        self._release_ended_runs(flight)
        return outputs

    def rewind(self) -> None:
        """Drop the steps in flight, whose results will never arrive, as if they had never been planned.

        The next plan starts every row anew, whichever of these steps the workers have executed.
        """
        dropped, self._in_flight = self._in_flight, deque()
        runs = dict.fromkeys(run for flight in dropped for run in flight.runs)
        for run in runs:
            run.retreat(sum(flight.runs.get(run, 0) for flight in dropped))
            self._cache.uncommit(run)
        for run in runs:
            if run.is_current and run.first_step >= dropped[0].step:
                self._preempt(run)  # its cached blocks may be among those that were never computed
        if self._pools:
            for run in list(self._running):
                self._preempt(run)  # workers may have lost the hidden states of its first tokens
        for flight in dropped:
            self._release_ended_runs(flight)
        self._running.free_all_rows()
        self._is_rewound = True

    # Parts of plan().

    def _continue_running(self, draft: StepDraft) -> None:
        turn = -(-len(self._running) // self._num_stages)
        runs = self._runs_to_continue()
        drafts = {} if self._drafter is None else self._choose_drafts(runs[:turn], draft.budget, self._drafter)
        # If the step cannot have a token of each run, all get theirs in the order of their admission.
        steady = self._add_steady(runs, drafts, draft) if len(runs) <= min(turn, draft.budget) else []
        others = [run for run in runs if run not in draft.num_tokens] if len(steady) < len(runs) else []
        for run in others:
            if not draft.budget or len(draft.num_tokens) == turn:
                break
            if run.is_current:
                self._add_run(run, draft, drafts.get(run, []))
        # The runs advance only now, because some of them may have been preempted for others.
        if draft.is_short_of_blocks:
            steady = [run for run in steady if run.is_current]
        for run in steady:
            run.num_computed_tokens += 1
        for run in others:
            if run in draft.num_tokens:
                self._advance(run, draft.num_tokens[run])
        if self._drafter is not None:
            draft.settle()

    def _add_steady(self, runs: list[Run], drafts: Mapping[Run, list[int]], draft: StepDraft) -> list[Run]:
        """Add a token of each steady run that has no draft, and return these runs."""
        undrafted = [run for run in runs if run not in drafts] if drafts else runs
        steady = [
            run for run in undrafted if run.num_computed_tokens < run.steady_until or self._stays_steady(run, draft)
        ]
        draft.num_tokens = dict.fromkeys(steady, 1)
        draft.budget -= len(steady)
        return steady

    def _stays_steady(self, run: Run, draft: StepDraft) -> bool:
        """Allocate the block that a run needs to be steady in further steps. Returns False if it needs something else,
        or if no block is free."""
        if not 0 < run.steady_until < run.request.max_num_tokens - 2:
            return False
        added = self._cache.add_block(run)
        if added is None:
            return False
        draft.new_blocks[run] = added
        run.steady_until = self._steady_until(run)
        self._cache.commit(run)
        return True

    def _add_run(self, run: Run, draft: StepDraft, drafted: list[int]) -> None:
        """Add the uncomputed tokens of a run to the step, and drafted ones, as far as there is room."""
        num_tokens = min(run.num_uncomputed_tokens, draft.budget)
        if num_tokens == 0:
            return
        drafted = drafted[: draft.budget - num_tokens]
        if drafted and not self._extend_for(run, drafted, draft):
            drafted = []
        if self._reserve(run, num_tokens, draft):
            draft.add(run, num_tokens, drafted)

    def _runs_to_continue(self) -> list[Run]:
        """Return the running requests that the step may compute, in the order of their admission."""
        if self._num_stages == 1:
            drafting = None if self._drafter is None else self._drafting_runs()
            return [run for run in self._running if run not in drafting] if drafting else list(self._running)
        in_pipeline = self._runs_in_pipeline()
        return [
            run
            for run in self._running
            if run.num_uncomputed_tokens > 0 and run not in in_pipeline and not self._awaits_draft(run)
        ]

    def _drafting_runs(self) -> set[Run]:
        """Return the current runs of which a step in flight has or makes drafts. No other step may compute them."""
        return {run for flight in self._in_flight for run in (*flight.drafts, *flight.proposals) if run.is_current}

    def _runs_in_pipeline(self) -> set[Run]:
        """Return the runs whose next token is being computed by a step in the pipeline. A further step of such a run
        would make the first stage wait for that token, which the last stage samples."""
        first = self._next_step - (self._num_stages - 1)
        return {
            run for flight in self._in_flight if flight.step >= first for run in flight.runs if run.num_placeholders
        }

    def _awaits_draft(self, run: Run) -> bool:
        """Whether no step may compute the run before one in flight is applied, because of a draft."""
        if run.is_drafting:
            return True
        if self._drafter is None or self._num_stages == 1 or not run.num_placeholders:
            return False
        candidate = self._candidate(run, self._drafter)
        return candidate is not None and self._drafter.gain_of_waiting([candidate], num_rows=1) > LEAST_GAIN_OF_TURN

    def _choose_drafts(self, runs: Sequence[Run], budget: int, drafter: Drafter[Any]) -> dict[Run, list[int]]:
        """Return the drafts to compute behind the last tokens of some of these runs: those whose last token is known
        and the only one to compute. They leave room for a token of each run."""
        candidates = {
            run: candidate
            for run in runs
            if (candidate := self._candidate(run, drafter)) is not None
            and not run.num_placeholders
            and run.num_uncomputed_tokens == 1
        }
        if not candidates:
            return {}
        num_tokens = sum(run.num_uncomputed_tokens for run in runs)
        room = min(MAX_DRAFT_TOKENS, budget - len(runs))  # drafts may shorten the part of a prompt
        if room <= 0:
            return {}
        chosen = drafter.choose(list(candidates.values()), num_tokens=num_tokens, num_rows=len(runs), room=room)
        return {run: drafted for run, drafted in zip(candidates, chosen, strict=True) if drafted}

    def _candidate(self, run: Run, drafter: Drafter[Any]) -> Candidate | None:
        """Return the request of a run if tokens may be drafted for it."""
        request = run.request
        if request.follower is None or not drafter.is_predicted(request.follower):
            return None
        # A step samples one token more than it accepts.
        limit = request.max_num_tokens - len(request.token_ids) - 1
        return Candidate(request.follower, limit) if limit > 0 else None

    def _extend_for(self, run: Run, drafted: list[int], draft: StepDraft) -> bool:
        """Extend the block table of a run for its drafts, unless too few blocks are free."""
        added = self._cache.extend(run, len(run.request.token_ids) + len(drafted))
        if added:
            draft.new_blocks[run] = added
        return added is not None

    def _choose_proposals(self, draft: StepDraft, drafter: ModelDrafter) -> None:
        """Choose runs for which the draft model proposes tokens at the end of the step. Only runs that have already
        generated a token are considered. Their block tables are extended for the proposals if enough blocks are
        free."""
        asking = {}
        for run in draft.num_tokens:
            request = run.request
            # The step samples one token, and so does the one that checks the proposed ones.
            limit = request.max_num_tokens - run.num_known_tokens - 1
            is_generating = request.follower is not None and run.first_step < self._next_step
            if limit > 0 and is_generating and run.num_computed_tokens == run.num_known_tokens - 1:
                uncached = 1
                if drafter.computes_prompts:
                    uncached = run.num_known_tokens + run.num_drafts - run.num_draft_cached
                asking[run] = Asking(request.follower, limit, uncached, run.is_catching_up)
        if not asking:
            return
        for run, count in zip(
            asking, drafter.propose(list(asking.values()), num_rows=len(draft.num_tokens)), strict=True
        ):
            most = run.num_known_tokens + run.num_drafts + count - 1
            if count and (added := self._cache.extend(run, min(most, run.request.max_num_tokens))) is not None:
                draft.proposals[run] = count
                run.is_proposing = True
                run.steady_until = 0
                if added:
                    draft.new_blocks[run] = [*draft.new_blocks.get(run, []), *added]

    def _reserve(self, run: Run, num_tokens: int, draft: StepDraft) -> bool:
        """Allocate the blocks for the next `num_tokens` tokens, and preempt less urgent requests if necessary."""
        while (added := self._cache.extend(run, run.num_computed_tokens + num_tokens)) is None:
            draft.is_short_of_blocks = True
            if any(flight.block_tables for flight in self._in_flight):
                return False  # a step in flight will release blocks: wait for these before preempting more
            victim = self._running.least_urgent()
            self._preempt(victim)
            draft.drop(victim)
            if victim is run:
                return False
        if added:
            draft.new_blocks[run] = added
        return True

    def _admit_waiting(self, draft: StepDraft) -> None:
        self._waiting.release_suspect(self._in_flight)
        while self._running.has_free and draft.budget > 0 and (request := self._first_prepared()) is not None:
            cached = self._cache.lookup(request)
            # There must be room for the whole prompt, although its first chunk needs less: otherwise the request would
            # soon be preempted for the rest.
            if not self._cache.can_hold(len(request.token_ids), cached=cached):
                break
            self._admit(self._waiting.pop(), cached, draft)

    def _first_prepared(self) -> Request | None:
        """Return the next request to admit. Requests before it whose grammar the workers may have dropped wait for it
        once more."""
        while (request := self._waiting.first()) is not None:
            grammar = request.sampling.grammar
            if grammar is None or self._grammars.use(grammar):
                return request
            self._waiting.push_unprepared(self._waiting.pop(), grammar)
        return None

    def _queue(self, request: Request) -> None:
        """Let a new request wait for a row, or for its grammar. The grammar of a suspect is compiled at
        its turn, so that an exit of the engine identifies it."""
        grammar = request.sampling.grammar
        if grammar is None:
            self._waiting.push(request)
            return
        is_prepared = grammar in self._grammars
        self._counters.num_grammar_queries += 1
        self._counters.num_grammar_hits += is_prepared
        if is_prepared or request.is_suspect:
            self._waiting.push(request)
        else:
            self._waiting.push_unprepared(request, grammar)

    def _admit(self, request: Request, cached: list[int], draft: StepDraft) -> None:
        num_cached = len(cached) * self._cache.block_size
        num_tokens = min(len(request.token_ids) - num_cached, draft.budget)
        run = self._running.assign(
            request,
            block_ids=self._cache.allocate(num_cached + num_tokens, cached=cached),
            num_cached_tokens=num_cached,
            num_cached_blocks=len(cached),
            step=self._next_step,
        )
        if request.adapter is not None:
            request.adapter.num_running += 1
        draft.new_rows[run] = run.new_row()
        draft.add(run, num_tokens)
        if not request.was_started:
            self._count_lookup(request, num_cached)
            self._histograms.on_admitted(request.times, request.num_prompt_tokens - request.num_cached_tokens)
            if request.announce_start:
                self._early_chunks.append(request.make_start_chunk())
        self._advance(run, num_tokens)

    def _advance(self, run: Run, num_tokens: int) -> None:
        num_prompt_tokens = run.request.num_prompt_tokens - run.num_computed_tokens
        if num_prompt_tokens > 0:
            self._counters.num_prompt_tokens += min(num_tokens, num_prompt_tokens)
        run.num_computed_tokens += num_tokens
        self._cache.commit(run)
        if run.steady_until:
            run.steady_until = self._steady_until(run)

    def _steady_until(self, run: Run) -> int:
        """Return the number of computed tokens up to which a run that samples in every step is steady: until it needs a
        block, or the next step samples the last token of its request."""
        return min(self._cache.num_slots(run), run.request.max_num_tokens - 2)

    def _count_lookup(self, request: Request, num_cached: int) -> None:
        request.was_started = True
        request.num_cached_tokens = num_cached = min(num_cached, request.num_prompt_tokens)
        if self._cache.enable_prefix_caching and request.num_readable_tokens > 0:
            self._counters.num_prefix_queries += request.num_prompt_tokens
            self._counters.num_prefix_hits += num_cached

    def _make_plan(self, draft: StepDraft) -> StepPlan:
        plan = draft.make_plan(self._next_step, self._running.pop_freed_rows(), captures=self._routed is not None)
        flight = InFlightStep(
            self._next_step, self._weight_version, draft.num_tokens, plan.rows, draft.drafts, draft.proposals
        )
        self._in_flight.append(flight)
        self._next_step += 1
        self._is_rewound = False
        return plan

    def _preempt(self, run: Run) -> None:
        """Return the request to the waiting queue with its tokens, of which none counts as computed."""
        self._end_run(run)
        self._waiting.push(run.request)
        run.request.times.num_preemptions += 1
        self._counters.num_preemptions += 1

    # Parts of apply().

    def _append_tokens(self, flight: InFlightStep, result: StepResult, outputs: StepOutputs) -> dict[Run, list[bytes]]:
        """Append a token to the request of each steady run, unless it ends the request. Return the other runs, with the
        routed experts that the step reports of each."""
        others: dict[Run, list[bytes]] = {}
        drafter = self._drafter
        reported = iter(() if self._routed is None else self._routed.store(result))
        client: ClientId | None = None
        tokens: dict[str, int] = {}
        detailed: list[DetailedToken] = []
        for run, token_id in zip(flight.runs, flight.token_ids_of(result), strict=True):
            request = run.request
            if run.num_computed_tokens > run.steady_until or token_id is None or token_id in request.end_token_ids:
                num_reported = flight.runs[run] + len(flight.drafts.get(run, ())) if run.wants_routed_experts else 0
                others[run] = list(islice(reported, num_reported))
                continue
            request.token_ids.append(token_id)
            if drafter is not None:
                drafter.on_token(request.follower)
            if request.client is not client:
                client = request.client
                tokens, detailed = outputs.by_client[client].tokens, outputs.by_client[client].detailed
            if not request.is_detailed:
                tokens[request.request_id] = token_id
                continue
            experts = b""
            if run.wants_routed_experts:
                experts = next(reported)
                run.num_reported_tokens += 1
                request.routed_experts_from = run.num_reported_tokens
            detailed.append((request.request_id, token_id, result.logprobs.get(run.row), experts))
        assert next(reported, None) is None, "the step reports routed experts of more tokens than it computes"
        self._counters.num_generation_tokens += len(flight.runs) - len(others)
        return others

    def _make_chunks(
        self, runs: Mapping[Run, list[bytes]], flight: InFlightStep, result: StepResult
    ) -> list[AddressedChunk]:
        """Apply the result of a step to some of its runs, and return their chunks. `runs`: with the routed experts that
        the step reports of each."""
        sampled = dict(zip(result.rows, result.token_ids, strict=True))
        failures = {failure.row: failure for failure in result.failures}
        ended = set(result.ended)
        chunks = []
        for run, experts in runs.items():
            row = run.row
            routed = self._new_routed_experts(run, experts, flight, sampled, result) if experts else b""
            if row in failures:
                # The blocks are held until here even if the run has ended. Their content may be wrong.
                self._cache.invalidate(run)
            if not run.is_current:
                continue
            if self._drafter is not None and row not in sampled:
                self._index_prompt(run.request, self._drafter)
            if row in failures:
                chunks.append(self._fail(run, failures[row], routed))
            elif row in ended:
                chunks.append(self._end(run, result, routed))
            elif row in result.pooled:
                chunks.append(self._deliver_pooled(run, result.pooled[row], flight.weight_version))
            elif row in sampled:
                token_ids = _tokens_of(row, sampled, result)
                chunks.append(self._deliver(run, token_ids, result, routed, flight.weight_version))
            elif row in result.prompt_logprobs or routed:
                chunks.append(self._deliver(run, [], result, routed, flight.weight_version))
        return chunks

    def _new_routed_experts(
        self, run: Run, experts: list[bytes], flight: InFlightStep, sampled: Mapping[int, int], result: StepResult
    ) -> bytes:
        """Return the routed experts to send to the request of a run. `experts`: the experts of each token that the step
        computed for the run. Drafts that were not accepted, and tokens behind the request's last one, are left out."""
        assert self._routed is not None
        num_kept = flight.runs[run]
        if run in flight.drafts and run.row in sampled:
            num_kept += run.request.find_finish(_tokens_of(run.row, sampled, result))[0] - 1
        return self._routed.take_new(run, experts, num_kept)

    def _deliver(
        self, run: Run, token_ids: list[int], result: StepResult, routed: bytes, weight_version: str
    ) -> AddressedChunk:
        """Return the chunk for one request's part of a step result; the request may finish with it. `token_ids`: those
        that the step sampled, none while the prompt is being computed."""
        request = run.request
        prompt_logprobs = result.prompt_logprobs.get(run.row)
        if prompt_logprobs is not None:
            assert prompt_logprobs.start == request.prompt_logprobs_from, "prompt logprobs arrive once and in order"
            request.prompt_logprobs_from += len(prompt_logprobs.ranks)
        if not token_ids:
            return request.make_chunk(prompt_logprobs=prompt_logprobs, routed_experts=routed)
        if run.num_drafts:
            self._count_draft(run, num_accepted=len(token_ids) - 1)
        run.settle(token_ids)
        num_tokens, finish = request.find_finish(token_ids)
        token_ids = token_ids[:num_tokens]
        self._counters.num_generation_tokens += num_tokens
        new_version = None if weight_version == request.weight_version else weight_version
        request.weight_version = weight_version
        self._predict(request, token_ids)
        if self._model_drafter is not None and run.row in result.proposals:
            proposal = result.proposals[run.row]
            self._model_drafter.on_proposal(request.follower, proposal.token_ids)
            run.num_draft_cached = proposal.num_cached
            run.is_catching_up = proposal.num_cached < len(request.token_ids)
        is_first = request.times.first_token_at is None
        if is_first:
            self._histograms.on_first_token(request.times)
        if finish is not None:
            self._remove(request)
        elif weight_version == self._weight_version and not run.is_proposing:  # else a step in flight brings more
            run.steady_until = self._steady_until(run)
        logprobs = []
        if run.row in result.logprobs:
            logprobs = [result.logprobs[run.row], *result.checked_logprobs.get(run.row, ())][:num_tokens]
        addressed = request.make_chunk(
            token_ids=token_ids,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            routed_experts=routed,
            weight_version=new_version,
            finish_reason=finish.reason if finish else None,
            stop_token_id=finish.stop_token_id if finish else None,
        )
        if is_first:  # added afterwards, so that no other token pays for it
            chunk = msgspec.structs.replace(addressed.chunk, **request.times.until_now())
            addressed = addressed._replace(chunk=chunk)
        return addressed

    def _predict(self, request: Request, token_ids: list[int]) -> None:
        """Append generated tokens to a request, and predict the next ones."""
        if self._drafter is None:
            request.token_ids += token_ids
            return
        if request.follower is None:
            request.follower = self._drafter.begin(request)
        for token_id in token_ids:
            request.token_ids.append(token_id)
            self._drafter.on_token(request.follower)

    def _index_prompt(self, request: Request, drafter: Drafter[Any]) -> None:
        """Index a part of a prompt while it is being computed."""
        if request.follower is None:
            request.follower = drafter.begin(request)
        drafter.index_tokens(request.follower)

    def _count_step(self, drafter: Drafter[Any], flight: InFlightStep, result: StepResult, seconds: float) -> None:
        """Count the time of a step, and what was gained by its drafts."""
        num_rows, num_tokens = len(flight.runs), flight.num_tokens
        num_drafts = sum(map(len, flight.drafts.values()))
        if num_tokens - num_drafts > num_rows:
            drafter.on_prompt_step(num_tokens=num_tokens, seconds=seconds)
        elif num_rows:
            num_accepted = sum(len(result.checked_token_ids.get(run.row, ())) for run in flight.drafts)
            num_steps = 1 if num_drafts else COUNTED_STEPS
            drafter.on_step(
                num_rows=num_rows,
                num_drafts=num_drafts,
                num_accepted=num_accepted,
                seconds=seconds,
                num_steps=num_steps,
            )

    def _count_draft(self, run: Run, *, num_accepted: int) -> None:
        assert self._drafter is not None and run.request.follower is not None
        self._drafter.on_checked(run.request.follower, num_accepted)
        self._counters.num_drafts += 1
        self._counters.num_draft_tokens += run.num_drafts
        self._counters.num_accepted_tokens += num_accepted

    def _deliver_pooled(self, run: Run, vector: Array, weight_version: str) -> AddressedChunk:
        """Finish a request with the vector of its prompt."""
        new_version = None if weight_version == run.request.weight_version else weight_version
        self._remove(run.request)
        return run.request.make_chunk(
            pooled=vector,
            weight_version=new_version,
            finish_reason=FinishReason.STOP,
            **run.request.times.until_now(),
        )

    def _end(self, run: Run, result: StepResult, routed: bytes) -> AddressedChunk:
        """Finish a request whose text is complete, without a further token."""
        times = run.request.times.until_now() if run.request.times.first_token_at is None else {}
        self._remove(run.request)
        return run.request.make_chunk(
            prompt_logprobs=result.prompt_logprobs.get(run.row),
            routed_experts=routed,
            finish_reason=FinishReason.STOP,
            **times,
        )

    def _fail(self, run: Run, failure: RowFailure, routed: bytes) -> AddressedChunk:
        self._remove(run.request)
        return run.request.make_chunk(
            finish_reason=FinishReason.ERROR,
            error=failure.message,
            is_user_error=failure.is_user_error,
            routed_experts=routed,
        )

    def _refuse(self, request: Request, failure: Failure) -> AddressedChunk:
        """Fail a request without a row, because of its grammar."""
        self._remove(request)
        return request.make_chunk(
            finish_reason=FinishReason.ERROR,
            error=failure.message,
            is_user_error=failure.is_user_error,
            param=failure.param or PARAM if failure.is_user_error else None,
        )

    # Requests leave.

    def _abort(self, requests: list[Request]) -> list[AddressedChunk]:
        for request in requests:
            self._remove(request)
        return [request.make_chunk(finish_reason=FinishReason.ABORT) for request in requests]

    def _remove(self, request: Request) -> None:
        """Remove a request from the queue, the quarantine or its row."""
        del self._requests[request.client, request.request_id]
        self._histograms.on_ended(request.times)
        if self._drafter is not None and request.follower is not None:
            self._drafter.end(request.follower)
        if request.adapter is not None:
            self.adapters.release(request.adapter)
        self._waiting.on_finished(request, has_row=request.run is not None)
        if request.run is not None:
            self._end_run(request.run)

    def _end_run(self, run: Run) -> None:
        """End a run. Its blocks are released at once, or when the last step in flight that uses them is applied."""
        self._cache.commit(run)
        self._running.free(run)
        if run.request.adapter is not None:
            run.request.adapter.num_running -= 1
        last = next((flight for flight in reversed(self._in_flight) if run in flight.runs), None)
        if last is None:
            self._cache.release(run.block_ids)
        else:
            last.block_tables.append(run.block_ids)

    def _release_ended_runs(self, flight: InFlightStep) -> None:
        """Release the blocks of ended runs that the step was the last to use."""
        for block_ids in flight.block_tables:
            self._cache.release(block_ids)


def _tokens_of(row: int, sampled: Mapping[int, int], result: StepResult) -> list[int]:
    """Return all tokens that a step sampled in a row: one, and with a draft those after each accepted token."""
    return [sampled[row], *result.checked_token_ids.get(row, ())]


def _draft_seconds(result: StepResult) -> float:
    return sum(seconds for _, seconds in result.draft_passes)
