"""Histograms of steps and requests that an engine reports."""

from __future__ import annotations

from scheduler_fakes import Engine, request

from eagleray.messages.distributions import BOUNDS


def counts(engine):
    reported = engine.scheduler.stats().distributions
    return {name: sum(getattr(reported, name).counts) for name in BOUNDS}


def test_histograms_count_requests_and_steps():
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    engine.add(request("a", range(9), max_tokens=3), request("b", range(9), max_tokens=3))
    engine.step()
    assert counts(engine) == {
        "step_tokens": 1,
        "prefill_tokens": 1,
        "queue_time": 1,
        "prefill_time": 1,
        "decode_time": 0,
        "inference_time": 0,
        "preemptions": 0,
        "mask_time": 0,
        "grammar_time": 0,
    }
    engine.run()
    assert counts(engine) == {
        "step_tokens": 6,
        "prefill_tokens": 2,
        "queue_time": 2,
        "prefill_time": 2,
        "decode_time": 2,
        "inference_time": 2,
        "preemptions": 2,
        "mask_time": 0,
        "grammar_time": 0,
    }
    stats = engine.scheduler.stats()
    assert stats.distributions.step_tokens.total == stats.num_prompt_tokens + stats.num_generation_tokens - 2
    assert stats.distributions.prefill_tokens.total == stats.num_prompt_tokens == 10  # the second prompt has 8 cached
    assert stats.distributions.preemptions.total == 0


def test_histograms_aborted_in_the_queue_count_nothing():
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    engine.add(request("a", range(9), max_tokens=3))
    engine.scheduler.abort_all()
    assert set(counts(engine).values()) == {0}


def test_histograms_report_is_a_copy():
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    before = engine.scheduler.stats().distributions
    engine.add(request("a", range(9), max_tokens=3))
    engine.run()
    assert sum(before.step_tokens.counts) == 0


def test_bounds_are_of_every_histogram_and_ascend():
    assert all(list(bounds) == sorted(set(bounds)) for bounds in BOUNDS.values())
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    reported = engine.scheduler.stats().distributions
    assert list(reported.__struct_fields__) == list(BOUNDS)
    assert all(len(getattr(reported, name).counts) == len(bounds) + 1 for name, bounds in BOUNDS.items())


def test_first_token_brings_the_times_until_then():
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    engine.add(request("a", range(9), max_tokens=3))
    first, *others = [chunk for _ in range(3) for chunk in engine.step()]
    assert first.queue_time > 0 and first.prefill_time > 0
    assert [(chunk.queue_time, chunk.prefill_time) for chunk in others] == [(0, 0), (0, 0)]
