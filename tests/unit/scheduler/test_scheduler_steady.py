"""Steady runs give the plans and the outputs that they would give if the scheduler took the other way for them."""

from __future__ import annotations

import random

import msgspec
import pytest
from drafters import EagerModelDrafter
from output_chunks import addressed_chunks
from scheduler_fakes import ALICE, BOB, VOCAB_SIZE, Engine, RandomDrafter, request

from eagleray.config.speculation import speculation
from eagleray.scheduler.step_outputs import AddressedChunk

DRAFT_MODEL = {"method": "draft_model", "model": "/draft", "num_speculative_tokens": 4}


class OrderlessDrafter(EagerModelDrafter):
    """Has numbers of tokens proposed that do not depend on the order of the requests."""

    def propose(self, asking, *, num_rows):
        lengths = [(one.follower.request.request_id, len(one.follower.request.token_ids)) for one in asking]
        wanted = [max(0, random.Random(repr(length)).randint(-3, self._max_tokens)) for length in lengths]
        return [min(one.limit, count) for one, count in zip(asking, wanted, strict=True)]


class Pair:
    """An engine whose runs are steady, and one whose runs never are, with the same requests."""

    def __init__(self, make_drafter, **options):
        self.steady = Engine(num_blocks=400, max_model_len=64, drafter=make_drafter(), **options)
        self.other = Engine(num_blocks=400, max_model_len=64, drafter=make_drafter(), **options)
        self.other.scheduler._steady_until = lambda run: 0
        self.both = self.steady, self.other
        self.num_alone = 0
        """Number of tokens that the first engine has sent without a chunk."""

    def plan(self):
        plans = [engine.plan() for engine in self.both]
        assert len({plan is None for plan in plans}) == 1
        if plans[0] is not None:
            assert len({repr(content_of(plan)) for plan in plans}) == 1
        return plans[0]

    def step(self):
        while len(self.steady.in_flight) < self.steady.depth and self.plan() is not None:
            pass
        self.apply()

    def apply(self):
        outputs = []
        for engine in self.both:
            engine.worker.written.popleft()
            engine.updates_of_steps.popleft()
            engine.suspects_of_steps.popleft()
            outputs.append(engine.scheduler.apply(engine.in_flight.popleft(), seconds=0.001))
        ours, others = (sorted(map(without_times, addressed_chunks(one)), key=repr) for one in outputs)
        assert repr(ours) == repr(others)
        assert not any(one.tokens or one.detailed for one in outputs[1].by_client.values())
        self.num_alone += sum(len(one.tokens) + len(one.detailed) for one in outputs[0].by_client.values())
        for engine in self.both:
            engine.receive(ours)

    def do(self, act):
        assert len({repr(act(engine)) for engine in self.both}) == 1


def without_times(addressed):
    client, chunk = addressed
    return AddressedChunk(client, msgspec.structs.replace(chunk, queue_time=0.0, prefill_time=0.0))


def content_of(plan):
    """Return what workers do by a plan, in whichever order its rows are."""
    return (
        sorted(plan.freed_rows),
        [(new.row, new.token_ids, new.num_computed_tokens, len(new.block_ids)) for new in plan.new_rows],
        sorted((row, len(added)) for row, added in plan.new_blocks),
        sorted(zip(plan.rows, plan.num_tokens, strict=True)),
        sorted(plan.drafts.items()),
        sorted(plan.settled_rows),
        sorted(plan.proposals.items()),
        sorted(plan.capture_rows),
    )


def random_request(choose, index, *, max_tokens):
    # The first token differs, so that no request finds blocks of another, which may be registered a step earlier.
    prompt = [1000 + index, *(choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(12)))]
    return request(
        str(index),
        prompt,
        client=choose.choice([ALICE, BOB]),
        max_tokens=choose.randrange(1, max_tokens),
        min_tokens=choose.randrange(3),
        eos=(0,) if choose.random() < 0.3 else (),
        stop=(3,) if choose.random() < 0.2 else (),
        logprobs=choose.choice([None, None, 0]),
        prompt_logprobs=choose.choice([None, None, None, 0]),
        routed_experts_from=choose.choice([None, 0, 1]),
    )


def drafter_of(kind):
    if kind is None:
        return None
    return RandomDrafter(5) if kind == "history" else OrderlessDrafter(speculation(DRAFT_MODEL), seed=5)


@pytest.mark.parametrize("kind", [None, "history", "model"])
@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_steady_runs_random_requests_plans_and_outputs_equal_those_of_the_other_way(kind, num_stages, seed):
    choose = random.Random(seed)
    pair = Pair(
        lambda: drafter_of(kind),
        depth=choose.randint(num_stages, 3),
        num_stages=num_stages,
        block_size=choose.choice([1, 2, 4]),
        max_num_seqs=choose.randrange(2, 9),
        max_num_batched_tokens=500,  # with less the steady runs would come before older prompts
        enable_prefix_caching=choose.random() < 0.7,
    )
    for index in range(20):
        message = random_request(choose, index, max_tokens=40)
        pair.do(lambda engine, message=message: engine.add(message))
        for _ in range(choose.randrange(5)):
            if pair.steady.scheduler.has_work:
                pair.step()
        event = choose.choice(["nothing", "nothing", "abort", "fail", "rewind", "update", "preempt"])
        client, name = choose.choice(list(pair.steady.messages))
        if event == "abort":
            pair.do(lambda engine, key=(client, name): engine.receive(engine.scheduler.abort(key[0], [key[1]])))
        elif event == "fail":
            pair.do(lambda engine, name=name: engine.worker.failing.add(name))
        elif event == "rewind":
            pair.plan()
            pair.do(lambda engine: engine.rewind())
        elif event in ("update", "preempt"):
            while pair.steady.in_flight:
                pair.apply()
            pair.do(Engine.apply_update if event == "update" else lambda engine: engine.scheduler.preempt_all())
    while pair.steady.scheduler.has_work:
        pair.step()
    assert repr(comparable(pair.steady)) == repr(comparable(pair.other))
    for key in pair.steady.messages:
        pair.steady.check_as_undisturbed(key)
    pair.steady.check_all_free()
    assert pair.num_alone > 10


def comparable(engine):
    """Return the statistics of an engine, without times."""
    stats = engine.scheduler.stats()
    return {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "distributions"}


def test_steady_runs_all_but_first_and_last_outputs_come_without_chunks():
    engine = Engine(depth=1, block_size=4, max_num_seqs=3)
    engine.add(
        request("plain", [1, 2], max_tokens=20),
        request("routed", [3, 4], max_tokens=20, routed_experts_from=0),
        request("rollout", [5, 6], max_tokens=20, routed_experts_from=0, logprobs=0),
    )
    for step in range(20):
        engine.plan()
        (outputs,) = engine.scheduler.apply(engine.in_flight.popleft()).by_client.values()
        if step in (0, 19):
            assert [chunk.request_id for chunk in outputs.chunks] == ["plain", "routed", "rollout"]
            continue
        assert outputs.chunks == []
        assert list(outputs.tokens) == ["plain"]
        (routed, token_id, no_logprobs, experts), (rollout, chosen, logprobs, further) = outputs.detailed
        assert (routed, rollout, no_logprobs) == ("routed", "rollout", None)
        assert logprobs.token_ids == [chosen] and len(experts) == len(further) == 6
        assert token_id == engine.scheduler._requests[ALICE, "routed"].token_ids[-1]


@pytest.mark.parametrize("kind", ["history", "model"])
def test_steady_runs_of_a_drafter_without_drafts_come_without_chunks(kind, monkeypatch):
    drafter = drafter_of(kind)
    monkeypatch.setattr(drafter, "choose", lambda candidates, **options: [[] for _ in candidates])
    monkeypatch.setattr(drafter, "gain_of_waiting", lambda candidates, **options: 0.0)
    if kind == "model":
        monkeypatch.setattr(drafter, "propose", lambda asking, **options: [0 for _ in asking])
    engine = Engine(depth=2, drafter=drafter)
    engine.add(request("a", [1, 2], max_tokens=20))
    num_chunks = 0
    while engine.scheduler.has_work:
        while len(engine.in_flight) < 2 and engine.plan() is not None:
            pass
        outputs = engine.scheduler.apply(engine.in_flight.popleft())
        num_chunks += sum(len(one.chunks) for one in outputs.by_client.values())
    assert num_chunks == 3, "the first, and those of the last steps in flight"
