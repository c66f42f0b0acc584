"""A fake worker that checks every plan, and an engine loop around it.

The worker's cache remembers, for each slot of each block, the whole prefix whose key and value would be there, so a
block that is lost, shared wrongly or read before it is written is detected at once. Its "language model" and its
"router" depend on the prefix alone, so the tokens of an undisturbed run are known in advance.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from dataclasses import dataclass, field
from hashlib import blake2b

import msgspec
import numpy as np
from output_chunks import addressed_chunks

from eagleray.config.speculation import speculation
from eagleray.identity import ClientId
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.outputs import Chunk, FinishReason, PromptLogprobs, TokenLogprobs
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import NewRow, Proposal, RowFailure, StepPlan, StepResult
from eagleray.scheduler.history_drafter import HistoryDrafter
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.step_outputs import AddressedChunk

VOCAB_SIZE = 16
ALICE = ClientId("test", 0)
BOB = ClientId("test", 1)
ROUTING = RoutingInfo(num_layers=2, num_experts=256, top_k=3)


def prefix_digests(token_ids, *, seed, known=(), update=0):
    """Return a digest of each position's prefix, that token included. `known` are the first digests; the others are
    computed with the weights of `update`."""
    digests = list(known)
    for token in token_ids[len(digests) :]:
        parent = digests[-1] if digests else seed.to_bytes(8, "little")
        content = parent + token.to_bytes(4, "little") + update.to_bytes(bool(update))
        digests.append(blake2b(content, digest_size=8).digest())
    return digests


def version_of(update):
    """Return the version that the fake engine gives to the weights of an update."""
    return f"v{update}" if update else "default"


def token_after(digest):
    return int.from_bytes(digest[:4], "little") % VOCAB_SIZE


def experts_of(digests):
    """[num_tokens, num_layers, top_k]"""
    shape = (len(digests), ROUTING.num_layers, ROUTING.top_k)
    return np.array([list(digest[: shape[1] * shape[2]]) for digest in digests], np.uint8).reshape(shape)


def request(
    request_id,
    prompt,
    *,
    client=ALICE,
    max_tokens=4,
    min_tokens=0,
    eos=(),
    stop=(),
    priority=0,
    salt="",
    prompt_logprobs=None,
    logprobs=None,
    output=(),
    prompt_logprobs_from=1,
    routed_experts_from=None,
    suspect=False,
):
    """The model's draws depend on the salt (by the seed), so that a block shared across salts is seen."""
    return Generate(
        request_id=request_id,
        client=client,
        prompt_token_ids=list(prompt),
        sampling=Sampling(seed=len(salt), prompt_logprobs=prompt_logprobs, logprobs=logprobs),
        stopping=Stopping(max_tokens=max_tokens, min_tokens=min_tokens, eos_token_ids=eos, stop_token_ids=stop),
        priority=priority,
        cache_salt=salt,
        output_token_ids=list(output),
        prompt_logprobs_from=prompt_logprobs_from,
        routed_experts_from=routed_experts_from,
        is_suspect=suspect,
    )


def undisturbed(message, *, max_model_len, update=0):
    """Return (generated tokens, finish reason, stop token) of the request when it runs alone, from its prompt even if
    it resumes, with the weights of `update`."""
    tokens, stopping = list(message.prompt_token_ids), message.stopping
    digests = []
    generated = []
    while True:
        digests = prefix_digests(tokens, seed=message.sampling.seed, known=digests, update=update)
        token = token_after(digests[-1])
        tokens.append(token)
        generated.append(token)
        if len(generated) >= stopping.min_tokens and token in stopping.eos_token_ids:
            return generated, FinishReason.STOP, None
        if len(generated) >= stopping.min_tokens and token in stopping.stop_token_ids:
            return generated, FinishReason.STOP, token
        if len(generated) == stopping.max_tokens or len(tokens) == max_model_len:
            return generated, FinishReason.LENGTH, None


@dataclass
class Row:
    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    num_computed: int
    block_ids: list[int]
    sampling: Sampling
    prompt_logprobs_from: int
    digests: list[bytes] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    checked: list[int] | None = None
    """Tokens sampled by drafts, until a plan has them."""
    is_continued: bool = False
    """Whether the row was started anew after steps were dropped."""


class FakeWorker:
    """Executes plans in order and checks everything that `StepPlan` promises."""

    def __init__(self, *, num_rows, num_blocks, block_size, max_num_batched_tokens, max_model_len):
        self.num_rows = num_rows
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.rows: dict[int, Row] = {}
        self.cells: dict[tuple[int, int], bytes] = {}
        self.update = 0
        """Number of the weight update that computes the next steps."""
        self.failing: set[str] = set()
        self.num_steps = 0
        self.written: deque[set[tuple[int, int]]] = deque()
        """Cells that each step in flight has written."""
        self.is_lost = False
        """Whether steps were dropped, so that rows may hold anything."""
        self.is_sound = True
        """Whether every plan so far was valid."""

    def execute(self, plan: StepPlan) -> StepResult:
        self.is_sound = False
        assert plan.step == self.num_steps
        self.num_steps += 1
        if plan.is_idle:
            assert not (
                plan.freed_rows or plan.new_rows or plan.new_blocks or plan.rows or plan.num_tokens or plan.capture_rows
            )
            self.written.append(set())
            self.is_sound = True
            return StepResult(step=plan.step, rows=[], token_ids=[])
        self._begin_after_rewind(plan)
        self._update_rows(plan)
        self._settle_rows(plan)
        self._check_budget(plan)
        self._write(plan)
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            self._read(self.rows[row], num_tokens)
        experts, slots = self._capture(plan)
        result = self._sample(plan)
        result = msgspec.structs.replace(result, proposals=self._propose(plan, result))
        self.is_sound = True
        return msgspec.structs.replace(result, routed_experts=experts, routed_slots=slots)

    def lose(self) -> None:
        """Drop the steps in flight and spoil the cells that they have written."""
        self.cells.update(dict.fromkeys(set().union(*self.written), b"lost"))
        self.written.clear()
        self.is_lost = True

    @property
    def used_blocks(self) -> set[int]:
        return {block for row in self.rows.values() for block in row.block_ids}

    def _begin_after_rewind(self, plan):
        self.restarts_all = self.is_lost
        if self.is_lost:
            assert sorted(plan.freed_rows) == list(range(self.num_rows)), "a row keeps stale content"
            self.rows = {row: Row("lost", [], 0, 0, [], Sampling(seed=0), 1) for row in plan.freed_rows}
            self.is_lost = False

    def _update_rows(self, plan):
        assert len(set(plan.freed_rows)) == len(plan.freed_rows)
        for row in plan.freed_rows:
            del self.rows[row]
        for start in plan.new_rows:
            self._start(start)
        for row, block_ids in plan.new_blocks:
            assert block_ids and (self.restarts_all or row not in {start.row for start in plan.new_rows})
            self.rows[row].block_ids += block_ids
        for row in self.rows.values():
            assert len(set(row.block_ids)) == len(row.block_ids)
            assert all(0 <= block < self.num_blocks for block in row.block_ids)

    def _start(self, start: NewRow):
        assert 0 <= start.row < self.num_rows and start.row not in self.rows
        assert 0 <= start.num_computed_tokens < len(start.token_ids) < self.max_model_len
        self.rows[start.row] = Row(
            request_id=start.request_id,
            token_ids=list(start.token_ids),
            num_prompt_tokens=start.num_prompt_tokens,
            num_computed=start.num_computed_tokens,
            block_ids=list(start.block_ids),
            sampling=start.sampling,
            prompt_logprobs_from=start.prompt_logprobs_from,
            is_continued=self.restarts_all,
        )

    def _settle_rows(self, plan):
        """Append the tokens of rows whose last step had drafts, and put the drafts of this step behind."""
        assert len(dict(plan.settled_rows)) == len(plan.settled_rows)
        for index, token_ids in plan.settled_rows:
            row = self.rows[index]
            assert token_ids == row.checked, "the tokens are not those that the row sampled"
            row.checked = None
            row.token_ids += token_ids
            row.num_computed = len(row.token_ids) - 1
        assert plan.drafts.keys() <= set(plan.rows)
        for index, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            row = self.rows[index]
            assert row.checked is None, "the row is computed before its tokens are known"
            row.drafts = plan.drafts.get(index, [])
            if row.drafts:
                assert row.num_computed + num_tokens == len(row.token_ids) + len(row.drafts)

    def _check_budget(self, plan):
        assert plan.rows and len(set(plan.rows)) == len(plan.rows)
        assert self.restarts_all or {start.row for start in plan.new_rows} <= set(plan.rows)
        assert min(plan.num_tokens) >= 1 and sum(plan.num_tokens) <= self.max_num_batched_tokens
        for row, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            end = self.rows[row].num_computed + num_tokens
            row = self.rows[row]
            assert end <= len(row.token_ids) + len(row.drafts) < self.max_model_len
            assert len(row.block_ids) * self.block_size >= end

    def _write(self, plan):
        """Write every row before any row reads, as a layer does."""
        written = set()
        for index, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            row = self.rows[index]
            if row.is_continued and not row.digests:
                row.digests = self._digests_of_continued(row)
            tokens = [*row.token_ids, *row.drafts][: row.num_computed + num_tokens]
            del row.digests[row.num_computed :]  # those of drafts that were not accepted
            row.digests = prefix_digests(tokens, seed=row.sampling.seed, known=row.digests, update=self.update)
            for position in range(row.num_computed, row.num_computed + num_tokens):
                cell = self._cell(row, position)
                assert cell not in written, "two rows write the same slot"
                written.add(cell)
                self.cells[cell] = row.digests[position]
        self.written.append(written)

    def _digests_of_continued(self, row):
        """Return the digests of a run that continues after steps were dropped: updates may have come within it, each
        of which changed the weights for all later positions."""
        digests, update = [], 0
        for position in range(row.num_computed):
            cell, tokens = self.cells.get(self._cell(row, position)), row.token_ids[: position + 1]
            options = {
                number: prefix_digests(tokens, seed=row.sampling.seed, known=digests, update=number)
                for number in range(update, self.update + 1)
            }
            update, digests = next((number, option) for number, option in options.items() if option[-1] == cell)
        return digests

    def _read(self, row, num_tokens):
        for position in range(row.num_computed + num_tokens):
            assert self.cells.get(self._cell(row, position)) == row.digests[position], "not the request's own prefix"

    def _cell(self, row, position):
        return row.block_ids[position // self.block_size], position % self.block_size

    def _capture(self, plan):
        """Return the experts and the cache slots of the tokens that the step computes of the captured rows."""
        assert plan.capture_rows == [row for row in plan.rows if row in plan.capture_rows]
        if not plan.capture_rows:
            return None, None
        num_tokens = dict(zip(plan.rows, plan.num_tokens, strict=True))
        digests, slots = [], []
        for index in plan.capture_rows:
            row = self.rows[index]
            positions = range(row.num_computed, row.num_computed + num_tokens[index])
            digests += [row.digests[position] for position in positions]
            cells = [self._cell(row, position) for position in positions]
            slots += [block * self.block_size + offset for block, offset in cells]
        return experts_of(digests), np.array(slots, dtype=np.int32)

    def _sample(self, plan):
        rows, token_ids, logprobs, prompt_logprobs, failures = [], [], {}, {}, []
        checked_token_ids, checked_logprobs = {}, {}
        for index, num_tokens in zip(plan.rows, plan.num_tokens, strict=True):
            row = self.rows[index]
            begin, row.num_computed = row.num_computed, row.num_computed + num_tokens - len(row.drafts)
            if row.request_id in self.failing:
                failures.append(RowFailure(index, "no token is allowed"))
                if row.num_computed == len(row.token_ids):
                    row.token_ids.append(0)  # the steps in flight go on with something
                continue
            found = prompt_logprobs_of(row, begin, row.num_computed)
            if found is not None:
                prompt_logprobs[index] = found
            if row.num_computed == len(row.token_ids):
                token = token_after(row.digests[row.num_computed - 1])
                rows.append(index)
                token_ids.append(token)
                if row.sampling.logprobs is not None:
                    logprobs[index] = TokenLogprobs([token], [-float(token)], 1)
                if not row.drafts:
                    row.token_ids.append(token)
                    continue
                row.checked = [token]
                for drafted, digest in zip(row.drafts, row.digests[row.num_computed :], strict=True):
                    if row.checked[-1] != drafted:
                        break
                    row.checked.append(token_after(digest))
                checked_token_ids[index] = row.checked[1:]
                if row.sampling.logprobs is not None:
                    checked_logprobs[index] = [TokenLogprobs([one], [-float(one)], 1) for one in row.checked[1:]]
        return StepResult(
            step=plan.step,
            rows=rows,
            token_ids=token_ids,
            logprobs=logprobs,
            checked_token_ids=checked_token_ids,
            checked_logprobs=checked_logprobs,
            prompt_logprobs=prompt_logprobs,
            failures=failures,
        )

    def _propose(self, plan, result):
        """Return a random number of right tokens behind those that rows have sampled, then wrong ones."""
        assert plan.proposals.keys() <= set(plan.rows)
        proposals, choose = {}, random.Random(plan.step)
        for index in plan.proposals.keys() & set(result.rows):
            row = self.rows[index]
            tokens = known = row.token_ids + (row.checked or [])
            assert len(row.block_ids) * self.block_size >= len(known), "there is no room for the last token"
            for _ in range(choose.randint(0, plan.proposals[index])):
                digests = prefix_digests(
                    tokens, seed=row.sampling.seed, known=row.digests[: row.num_computed], update=self.update
                )
                tokens = [*tokens, choose.choice([token_after(digests[-1])] * 3 + [choose.randrange(VOCAB_SIZE)])]
            proposals[index] = Proposal(tokens[len(known) :], len(known))
        return proposals


def prompt_logprobs_of(row, begin, end):
    """Return log-probabilities of the wanted positions with predecessors `begin` to `end - 1`; each is minus the
    position."""
    positions = range(max(begin + 1, row.prompt_logprobs_from), min(end + 1, row.num_prompt_tokens))
    if row.sampling.prompt_logprobs is None or not positions:
        return None
    return PromptLogprobs(
        start=positions[0],
        token_ids=np.array([[row.token_ids[p]] for p in positions], np.int32),
        logprobs=np.array([[-p] for p in positions], np.float32),
        ranks=np.ones(len(positions), np.int32),
    )


class RandomDrafter(HistoryDrafter):
    """Drafts by a random number of right tokens, then wrong ones, and waits for tokens at random."""

    def __init__(self, seed):
        super().__init__(speculation({"method": "ngram", "num_speculative_tokens": 4}))
        self._random = random.Random(seed)
        self._seeds = {}

    def begin(self, request):
        follower = super().begin(request)
        self._seeds[follower] = request.sampling.seed
        return follower

    def choose(self, candidates, *, num_tokens, num_rows, room):
        chosen = []
        for follower, limit in candidates:
            chosen.append(self._draft(follower, follower.token_ids, min(limit, room)))
            room -= len(chosen[-1])
        return chosen

    def _draft(self, follower, token_ids, limit):
        choose = self._random
        num_right, tokens = choose.randrange(5), list(token_ids)
        digests = []
        for number in range(min(choose.randrange(5), limit)):
            digests = prefix_digests(tokens, seed=self._seeds[follower], known=digests)
            tokens.append(token_after(digests[-1]) if number < num_right else choose.randrange(VOCAB_SIZE))
        return tokens[len(token_ids) :]

    def is_predicted(self, follower):
        return True

    def gain_of_waiting(self, candidates, *, num_rows):
        return self._random.choice([0.0, 0.0, 1.0])


class Engine:
    """A scheduler and a fake worker, with up to `depth` steps in flight."""

    def __init__(
        self,
        *,
        depth=1,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=32,
        block_size=4,
        num_blocks=32,
        enable_prefix_caching=True,
        policy="fcfs",
        num_stages=1,
        vocab_size=2**31,
        routing=ROUTING,
        drafter=None,
    ):
        self.depth = depth
        self.num_stages = num_stages
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=enable_prefix_caching,
            policy=policy,
            num_stages=num_stages,
            vocab_size=vocab_size,
            routing=routing,
            drafter=drafter,
        )
        self.worker = FakeWorker(
            num_rows=max_num_seqs,
            num_blocks=num_blocks,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
        )
        self.in_flight: deque[StepResult] = deque()
        self.started: list[str] = []
        """Requests whose start was announced."""
        self.updates_of_steps: deque[int] = deque()
        """Number of the weight update that each step in flight is computed with."""
        self.versions: dict[tuple[ClientId, str], str] = defaultdict(lambda: "default")
        """Version of the last token of each request, as its client knows it."""
        self.first_updates: dict[tuple[ClientId, str], int] = {}
        """Number of the last weight update when each request came."""
        self.updated: set[tuple[ClientId, str]] = set()
        """Requests during which the weights were updated."""
        self.suspects_of_steps: deque[set[str]] = deque()
        """Suspects that each step in flight computes."""
        self.plans: list[StepPlan] = []
        self.messages: dict[tuple[ClientId, str], Generate] = {}
        self.chunks: dict[tuple[ClientId, str], list[Chunk]] = defaultdict(list)

    def add(self, *messages):
        for message in messages:
            self.scheduler.add(message)
            self.messages[message.client, message.request_id] = message
            self.first_updates[message.client, message.request_id] = self.worker.update

    def plan(self) -> StepPlan | None:
        num_preemptions = self.scheduler.stats().num_preemptions
        plan = None if self.scheduler.waits_for_tokens else self.scheduler.plan()
        self._record_started(self.scheduler.pop_early_chunks())
        if plan is not None:
            has_preempted = self.scheduler.stats().num_preemptions > num_preemptions
            is_anew = self.worker.is_lost
            assert is_anew or not (has_preempted and plan.new_rows), (
                "a request is admitted into the blocks of a preempted one"
            )
            self.plans.append(plan)
            result = self.worker.execute(plan)
            if not self.in_flight and self.num_stages == 1:
                assert sorted(plan.rows) == sorted(self.worker.rows), "a running request is left out"
            self.in_flight.append(result)
            self.updates_of_steps.append(self.worker.update)
            self._check_suspects(plan)
            self._check_capture(plan)
        return plan

    def idle(self) -> None:
        """Take an idle step."""
        self.plans.append(self.scheduler.idle_plan())
        self.in_flight.append(self.worker.execute(self.plans[-1]))
        self.updates_of_steps.append(self.worker.update)
        self.suspects_of_steps.append(set())

    def rewind(self) -> None:
        """Drop the steps in flight."""
        self.worker.lose()
        self.in_flight.clear()
        self.updates_of_steps.clear()
        self.suspects_of_steps.clear()
        self.scheduler.rewind()

    def apply(self) -> list[Chunk]:
        self.suspects_of_steps.popleft()
        self.worker.written.popleft()
        result, update = self.in_flight.popleft(), self.updates_of_steps.popleft()
        chunks = self.receive(addressed_chunks(self.scheduler.apply(result)))
        for (client, name), version in self._versions_of(chunks):
            assert version == version_of(update), f"a token of {name} for {client} has a wrong version"
        return chunks

    def _versions_of(self, chunks):
        """Yield the version of each chunk that has a token, by its request."""
        for key in [key for key in self.messages if key[1] in {chunk.request_id for chunk in chunks}]:
            chunk = self.chunks[key][-1]
            if chunk in chunks and chunk.token_ids:
                self.versions[key] = chunk.weight_version or self.versions[key]
                yield key, self.versions[key]

    def settle(self) -> None:
        """Apply the steps in flight."""
        while self.in_flight:
            self.apply()

    def apply_update(self) -> None:
        """Finish the steps in flight, then give the worker new weights."""
        self.settle()
        self.worker.update += 1
        self.scheduler.set_weights(update=self.worker.update, version=version_of(self.worker.update))
        self.updated |= {key for key in self.messages if not self.is_ended(key)}

    def _record_started(self, notices: list[AddressedChunk]) -> None:
        for client, chunk in notices:
            assert chunk == Chunk(request_id=chunk.request_id, is_started=True)
            message = self.messages[client, chunk.request_id]
            assert (message.is_suspect or message.announce_start) and chunk.request_id not in self.started
            self.started.append(chunk.request_id)

    def _check_suspects(self, plan: StepPlan) -> None:
        """Check that every computed suspect was announced and that steps in flight compute at most one."""
        suspects = {message.request_id for message in self.messages.values() if message.is_suspect}
        computed = {self.worker.rows[row].request_id for row in plan.rows} & suspects
        assert computed <= set(self.started)
        self.suspects_of_steps.append(computed)
        assert len(set().union(*self.suspects_of_steps)) <= 1

    def _check_capture(self, plan: StepPlan) -> None:
        """Check that exactly the rows of requests that want routed experts are captured."""
        wanting = {m.request_id for m in self.messages.values() if m.routed_experts_from is not None}
        assert plan.capture_rows == [row for row in plan.rows if self.worker.rows[row].request_id in wanting]

    def resumed(self, key) -> Generate:
        """Return the request as its client would resume it on another engine."""
        message = self.messages[key]
        return msgspec.structs.replace(
            message,
            output_token_ids=[*message.output_token_ids, *self.tokens(message.request_id, message.client)],
            prompt_logprobs_from=message.prompt_logprobs_from + len(self.prompt_logprob_positions(key)),
            routed_experts_from=self.routed_experts_until(key),
        )

    def receive(self, addressed: list[AddressedChunk]) -> list[Chunk]:
        for client, chunk in addressed:
            key = client, chunk.request_id
            assert not self.is_ended(key), "a chunk after the last one"
            self.chunks[key].append(chunk)
        return [chunk for _, chunk in addressed]

    def step(self) -> list[Chunk]:
        while len(self.in_flight) < self.depth and self.plan() is not None:
            pass
        assert self.in_flight, "there is work, but no step is planned or in flight"
        return self.apply()

    def run(self):
        for _ in range(5000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the requests do not finish")

    def is_ended(self, key) -> bool:
        return bool(self.chunks.get(key)) and self.chunks[key][-1].finish_reason is not None

    def tokens(self, request_id, client=ALICE) -> list[int]:
        return [token for chunk in self.chunks[client, request_id] for token in chunk.token_ids]

    def last(self, request_id, client=ALICE) -> Chunk:
        return self.chunks[client, request_id][-1]

    def check_as_undisturbed(self, key):
        """Check that the chunks equal those of a run alone, cut off where the request was aborted or failed, and
        without the part that another engine has delivered. If the weights were updated, only the length is known."""
        message, chunks = self.messages[key], self.chunks[key]
        for chunk in chunks:
            wanted = chunk.token_ids if message.sampling.logprobs is not None else []
            assert chunk.logprobs == [TokenLogprobs([token], [-float(token)], 1) for token in wanted]
        if key in self.updated:
            num_tokens = len(self.tokens(message.request_id, message.client)) + len(message.output_token_ids)
            room = min(message.stopping.max_tokens, self.max_model_len - len(message.prompt_token_ids))
            assert num_tokens == room if chunks[-1].finish_reason is FinishReason.LENGTH else num_tokens <= room
            return
        update = self.first_updates[key]
        expected, reason, stop_token = undisturbed(message, max_model_len=self.max_model_len, update=update)
        num_computed = len(message.prompt_token_ids) + len(expected) - 1
        expected = expected[len(message.output_token_ids) :]
        routed_until = self.routed_experts_until(key)
        tokens = self.tokens(message.request_id, message.client)
        last = chunks[-1]
        if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, last.finish_reason, last.stop_token_id) == (expected, reason, stop_token)
            if message.sampling.prompt_logprobs is not None:
                assert self.prompt_logprob_positions(key) == list(
                    range(message.prompt_logprobs_from, len(message.prompt_token_ids))
                )
            if message.routed_experts_from is not None:
                assert routed_until == max(num_computed, message.routed_experts_from)
        assert all(chunk.num_cached_tokens == 0 for chunk in chunks[1:])

    def prompt_logprob_positions(self, key) -> list[int]:
        parts = [chunk.prompt_logprobs for chunk in self.chunks[key] if chunk.prompt_logprobs is not None]
        prompt = self.messages[key].prompt_token_ids
        for part in parts:
            assert part.token_ids[:, 0].tolist() == prompt[part.start : part.start + len(part.ranks)]
        return [-int(value) for part in parts for value in part.logprobs[:, 0]]

    def routed_experts_until(self, key) -> int | None:
        """Return the first position whose experts were not sent, and check the sent ones: right, once each, in
        order."""
        message = self.messages[key]
        update, seed = self.first_updates[key], message.sampling.seed
        output, _, _ = undisturbed(message, max_model_len=self.max_model_len, update=update)
        experts = experts_of(prefix_digests([*message.prompt_token_ids, *output], seed=seed, update=update))
        until = message.routed_experts_from
        for chunk in self.chunks[key]:
            if chunk.routed_experts:
                sent = ROUTING.rows(chunk.routed_experts)
                assert np.array_equal(sent, experts[until : until + len(sent)])
                until += len(sent)
        return until

    def check_all_free(self):
        stats = self.scheduler.stats()
        assert stats.num_free_kv_blocks == stats.num_kv_blocks
        assert (stats.num_running, stats.num_waiting) == (0, 0)
