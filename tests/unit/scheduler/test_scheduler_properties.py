"""Any order of arrivals, aborts, failures, plans and results, against the fake worker, which checks every read."""

from __future__ import annotations

import random

import msgspec
import pytest
from drafters import EagerModelDrafter
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_fakes import ALICE, BOB, VOCAB_SIZE, Engine, RandomDrafter, request, undisturbed

from eagleray.config.speculation import speculation

DRAFT_MODEL = {"method": "draft_model", "model": "/draft", "num_speculative_tokens": 4}
PREFIXES = [[], [1] * 4, [1] * 9, [1, 1, 1, 1, 2, 3, 4, 5, 6], [7, 8]]


@st.composite
def engines(draw, max_model_len=None):
    """Draw an engine that is small in every respect, so that rows, blocks and budget run out all the time."""
    block_size = draw(st.sampled_from([1, 2, 3, 4]))
    max_model_len = max_model_len or draw(st.integers(2, 24))
    return Engine(
        depth=draw(st.integers(1, 3)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_num_batched_tokens=draw(st.sampled_from([1, 2, 3, 5, 8, 64])),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + draw(st.integers(0, 8)),
        enable_prefix_caching=draw(st.booleans()),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        num_stages=draw(st.integers(1, 3)),
        drafter=draw(st.none() | st.builds(RandomDrafter, st.integers(0, 99))),
    )


def random_drafter(seed):
    """Return a drafter whose tokens are known to the scheduler, or one that asks the worker for proposals."""
    if seed % 4 == 1:
        return RandomDrafter(seed)
    return EagerModelDrafter(speculation(DRAFT_MODEL), seed=seed)


@st.composite
def messages(draw, request_id, max_model_len, update=0):
    own = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=6))
    prompt = [*draw(st.sampled_from(PREFIXES)), *own][-(max_model_len - 1) :]
    message = request(
        request_id,
        prompt,
        client=draw(st.sampled_from([ALICE, BOB])),
        max_tokens=draw(st.integers(1, 16)),
        min_tokens=draw(st.integers(0, 3)),
        eos=draw(st.sampled_from([(), (0,), (0, 1, 2)])),
        stop=draw(st.sampled_from([(), (3,)])),
        priority=draw(st.integers(-1, 1)),
        salt=draw(st.sampled_from(["", "", "s"])),
        logprobs=draw(st.sampled_from([None, 0])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0])),
        prompt_logprobs_from=draw(st.integers(1, len(prompt))),
        routed_experts_from=draw(st.none() | st.just(0) | st.integers(0, len(prompt))),
        suspect=draw(st.sampled_from([False, False, True])),
    )
    output, _, _ = undisturbed(message, max_model_len=max_model_len, update=update)
    num_known = draw(st.integers(0, len(output) - 1))
    return msgspec.structs.replace(message, output_token_ids=output[:num_known])


class SchedulerMachine(RuleBasedStateMachine):
    """Finish every request, then check the chunks of each."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = Engine()
        self.gone: set = set()

    @initialize(engine=engines())
    def begin(self, engine) -> None:
        self.engine = engine

    @rule(data=st.data())
    def add(self, data) -> None:
        name = str(len(self.engine.messages))
        self.engine.add(data.draw(messages(name, self.engine.max_model_len, self.engine.worker.update)))

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def plan(self) -> None:
        plan = self.engine.plan()
        assert plan is not None or self.engine.in_flight or not self.engine.scheduler.has_work
        if plan is not None and len(self.engine.in_flight) == 1:
            # Nothing else is in flight: the blocks in use are those of the rows, no more and no less.
            stats = self.engine.scheduler.stats()
            assert stats.num_kv_blocks - stats.num_free_kv_blocks == len(self.engine.worker.used_blocks)
            assert stats.num_running == len(self.engine.worker.rows)

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def apply(self) -> None:
        self.engine.apply()

    @precondition(lambda self: len(self.engine.in_flight) < self.engine.depth)
    @rule()
    def idle(self) -> None:
        self.engine.idle()

    @rule()
    def rewind(self) -> None:
        self.engine.rewind()

    @rule(how=st.sampled_from(["stop", "drain", "start"]))
    def change_planning(self, how) -> None:
        getattr(self.engine.scheduler, how)()

    @rule()
    def preempt_all(self) -> None:
        self.engine.settle()
        self.engine.scheduler.preempt_all()
        assert self.engine.scheduler.stats().num_running == 0
        assert self.engine.scheduler.reset_prefix_cache()

    @rule()
    def reset_prefix_cache(self) -> None:
        stats = self.engine.scheduler.stats()
        assert self.engine.scheduler.reset_prefix_cache() == (stats.num_free_kv_blocks == stats.num_kv_blocks)

    @rule()
    def update_weights(self) -> None:
        self.engine.apply_update()

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def abort(self, data) -> None:
        client, name = data.draw(st.sampled_from(self.open_requests()))
        outputs = self.engine.scheduler.abort(client, [name, "unknown"])
        assert [(out.client, out.chunk.request_id) for out in outputs] == [(client, name)]
        self.engine.receive(outputs)

    @precondition(lambda self: self.open_requests())
    @rule(data=st.data())
    def fail(self, data) -> None:
        """Have a request's row fail in the next step that computes it."""
        self.engine.worker.failing.add(data.draw(st.sampled_from(self.open_requests()))[1])

    @rule(client=st.sampled_from([ALICE, BOB]))
    def client_leaves(self, client) -> None:
        left = {key for key in self.open_requests() if key[0] == client}
        assert self.engine.scheduler.abort_client(client) == len(left)
        self.gone |= left

    @invariant()
    def every_open_request_runs_or_waits(self) -> None:
        stats = self.engine.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.open_requests())
        assert 0 <= stats.num_free_kv_blocks <= stats.num_kv_blocks

    def open_requests(self):
        return [key for key in self.engine.messages if key not in self.gone and not self.engine.is_ended(key)]

    def teardown(self) -> None:
        if not self.engine.worker.is_sound:
            return  # the failure that counts was raised by the plan
        self.engine.scheduler.start()
        self.engine.run()
        self.engine.check_all_free()
        for key in self.engine.messages.keys() - self.gone:
            self.engine.check_as_undisturbed(key)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(deadline=None, max_examples=150, stateful_step_count=50)


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_resumed_requests_random_cut_tokens_equal_undisturbed(data):
    """Two engines of any size, the first stopped anywhere, generate what one engine would have generated."""
    max_model_len = data.draw(st.integers(2, 24))
    first, second = data.draw(engines(max_model_len)), data.draw(engines(max_model_len))
    first.add(*(data.draw(messages(str(index), max_model_len)) for index in range(data.draw(st.integers(1, 6)))))
    for _ in range(data.draw(st.integers(0, 40))):
        if first.scheduler.has_work:
            first.step()
    second.add(*(first.resumed(key) for key in first.messages if not first.is_ended(key)))
    second.run()
    second.check_all_free()
    for key, message in first.messages.items():
        (first if first.is_ended(key) else second).check_as_undisturbed(key)
        generated, _, _ = undisturbed(message, max_model_len=max_model_len)
        told = [engine.tokens(message.request_id, message.client) for engine in (first, second)]
        assert [*message.output_token_ids, *told[0], *told[1]] == generated
    told = sum(len(engine.tokens(name, client)) for engine in (first, second) for client, name in first.messages)
    assert told == sum(engine.scheduler.stats().num_generation_tokens for engine in (first, second))


def live_a_day(engine, choose, *, num_requests, rewinds=0.0):
    """Requests with common beginnings arrive faster than they can run; some are aborted; all finish.
    `rewinds`: number of times that the steps in flight are dropped."""
    longest = engine.max_model_len - 1
    systems = [[choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, longest))] for _ in range(3)]
    for index in range(num_requests):
        own = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 8))]
        engine.add(
            request(
                str(index),
                (choose.choice(systems) + own)[:longest],
                max_tokens=choose.randrange(1, engine.max_model_len),
                eos=(0,) if choose.random() < 0.3 else (),
                priority=choose.randrange(3),
                salt=choose.choice(["", "", "s"]),
                logprobs=choose.choice([None, None, 0]),
                prompt_logprobs=choose.choice([None, None, 0]),
                routed_experts_from=choose.choice([None, 0, 1]),
            )
        )
        for _ in range(choose.randrange(4)):
            if engine.scheduler.has_work:
                engine.step()
        if choose.random() < 0.2:
            engine.receive(engine.scheduler.abort(ALICE, [str(choose.randrange(index + 1))]))
        if choose.random() < rewinds:
            engine.plan()
            engine.rewind()
    engine.run()
    for key in engine.messages:
        engine.check_as_undisturbed(key)
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("rewinds", [0, 0.3])
def test_scheduler_random_operations_invariants_hold(depth, policy, caching, rewinds):
    drafts = policy == "fcfs"
    engine = Engine(
        depth=depth,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        max_model_len=64,
        block_size=4,
        num_blocks=44,
        enable_prefix_caching=caching,
        policy=policy,
        drafter=random_drafter(depth + 2 * caching) if drafts else None,
    )
    live_a_day(engine, random.Random(f"{depth} {policy} {caching}"), num_requests=120, rewinds=rewinds)
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0 and (stats.num_prefix_hits > 0) == caching
    assert (0 < stats.num_accepted_tokens < stats.num_draft_tokens) == drafts


@pytest.mark.parametrize(
    "seed", [*range(150), *(pytest.param(seed, marks=pytest.mark.grid) for seed in range(150, 300))]
)
def test_scheduler_random_small_engine_tokens_equal_undisturbed(seed):
    choose = random.Random(seed)
    block_size, max_model_len = choose.randrange(1, 5), choose.randrange(4, 28)
    engine = Engine(
        depth=choose.randrange(1, 4),
        max_num_seqs=choose.randrange(2, 8),
        max_num_batched_tokens=choose.choice([1, 3, 6, 12, 100]),
        max_model_len=max_model_len,
        block_size=block_size,
        num_blocks=-(-max_model_len // block_size) + choose.randrange(8),
        enable_prefix_caching=choose.random() < 0.7,
        policy=choose.choice(["fcfs", "priority"]),
        drafter=random_drafter(seed) if seed % 2 else None,
    )
    live_a_day(engine, choose, num_requests=24, rewinds=choose.choice([0, 0.3]))
