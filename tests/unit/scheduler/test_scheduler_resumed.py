"""Requests that resume after another engine has generated a part."""

from __future__ import annotations

import pytest
from scheduler_fakes import ALICE, Engine, request, undisturbed

from eagleray.errors import InvalidRequest
from eagleray.messages.outputs import FinishReason

PROMPT = [1, 2, 3, 4, 5, 6]


def generated(count, prompt=PROMPT):
    """Return the tokens that the fake model generates after the prompt."""
    return undisturbed(request("r", prompt, max_tokens=20), max_model_len=1000)[0][:count]


def run(engine, *messages):
    engine.add(*messages)
    engine.run()
    for message in messages:
        engine.check_as_undisturbed((message.client, message.request_id))
    engine.check_all_free()


def test_resumed_request_new_row_has_output_and_sampling():
    engine = Engine(block_size=4)
    engine.add(request("r", PROMPT, max_tokens=5, output=generated(3)))
    (start,) = engine.plan().new_rows
    assert start.token_ids == PROMPT + generated(3)
    assert (start.num_prompt_tokens, start.num_computed_tokens, len(start.block_ids)) == (6, 0, 3)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_known", range(5))
def test_resumed_request_chunks_hold_new_tokens_only(depth, num_known):
    engine = Engine(depth=depth)
    run(engine, request("r", PROMPT, max_tokens=5, output=generated(num_known)))
    assert engine.tokens("r") == generated(5)[num_known:]
    assert engine.last("r").finish_reason is FinishReason.LENGTH


def test_resumed_request_max_model_len_counts_from_prompt_start():
    engine = Engine(max_model_len=12)
    run(engine, request("r", PROMPT, max_tokens=100, output=generated(4)))
    assert len(engine.tokens("r")) == 2


@pytest.mark.parametrize("ids", ["eos", "stop"])
@pytest.mark.parametrize("num_known", [1, 2, 3])
def test_resumed_request_min_tokens_counts_earlier_output(ids, num_known):
    engine = Engine()
    message = request("r", PROMPT, max_tokens=9, min_tokens=4, output=generated(num_known), **{ids: tuple(range(16))})
    run(engine, message)
    assert len(engine.tokens("r")) == 4 - num_known
    assert engine.last("r").finish_reason is FinishReason.STOP


def test_resumed_request_long_output_is_computed_in_chunks():
    engine = Engine(max_num_batched_tokens=4)
    engine.add(request("r", PROMPT, max_tokens=8, output=generated(5)))
    assert [[chunk.token_ids for chunk in engine.step()] for _ in range(3)] == [[], [], [generated(6)[5:]]]


def test_resumed_request_prompt_logprobs_continue():
    engine = Engine(max_num_batched_tokens=2)
    run(engine, request("r", PROMPT, prompt_logprobs=0, prompt_logprobs_from=3))
    assert engine.prompt_logprob_positions((ALICE, "r")) == [3, 4, 5]


def test_resumed_request_prompt_logprobs_all_sent_reads_cache():
    engine = Engine(block_size=4)
    run(engine, request("other", PROMPT))
    run(engine, request("r", PROMPT, output=generated(2), prompt_logprobs=0, prompt_logprobs_from=6))
    assert engine.prompt_logprob_positions((ALICE, "r")) == []
    assert engine.plans[-2].new_rows[0].num_computed_tokens == 4


def test_resumed_request_first_chunk_reports_cached_prompt_tokens():
    engine = Engine(block_size=4)
    run(engine, request("other", PROMPT, max_tokens=8))
    run(engine, request("r", PROMPT, max_tokens=8, output=generated(5)))
    assert engine.plans[-3].new_rows[0].num_computed_tokens == 8
    assert [chunk.num_cached_tokens for chunk in engine.chunks[ALICE, "r"]] == [6, 0, 0]


def test_resumed_request_earlier_output_is_found_in_cache():
    engine = Engine(block_size=4)
    run(engine, request("r", PROMPT, max_tokens=8, output=generated(6)))
    run(engine, request("turn2", [*PROMPT, *generated(6), 9], max_tokens=1))
    assert engine.chunks[ALICE, "turn2"][0].num_cached_tokens == 12


def test_resumed_request_totals_count_this_engine_only():
    engine = Engine(block_size=4)
    run(engine, request("r", PROMPT, max_tokens=8, output=generated(5)))
    stats = engine.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (6, 3)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (6, 0)
    run(engine, request("again", PROMPT, max_tokens=8, output=generated(7)))
    stats = engine.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (6, 4)
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (12, 6)


def test_resumed_request_preempted_again_continues_with_all_tokens():
    engine = Engine(block_size=2, num_blocks=8, max_model_len=16, enable_prefix_caching=False)
    names = ("a", "b", "c")
    run(engine, *(request(name, PROMPT[:3], max_tokens=13, output=generated(2, PROMPT[:3])) for name in names))
    assert engine.scheduler.stats().num_preemptions > 0


@pytest.mark.parametrize("num_known", [5, 6])
def test_admission_resumed_request_with_max_tokens_is_refused(num_known):
    with pytest.raises(InvalidRequest, match=rf"{num_known} output tokens already.* may have 5"):
        Engine().add(request("r", PROMPT, max_tokens=5, output=generated(num_known)))


def test_admission_resumed_request_at_max_model_len_is_refused():
    engine = Engine(max_model_len=10)
    with pytest.raises(InvalidRequest, match=r"4 output tokens already.* may have 4"):
        engine.add(request("r", PROMPT, max_tokens=100, output=generated(4)))
    assert not engine.scheduler.has_work


@pytest.mark.parametrize("bad", [-1, 16, 2**31])
def test_admission_output_token_outside_vocabulary_is_refused(bad):
    with pytest.raises(InvalidRequest, match="output's token ids must be between 0 and 15"):
        Engine(vocab_size=16).add(request("r", PROMPT, output=[1, bad]))


def test_admission_prompt_token_outside_vocabulary_is_refused():
    with pytest.raises(InvalidRequest, match="prompt's token ids must be between 0 and 15"):
        Engine(vocab_size=16).add(request("r", [16]))


@pytest.mark.parametrize("position", [-1, 0, 7])
def test_admission_prompt_logprobs_from_outside_prompt_is_refused(position):
    with pytest.raises(InvalidRequest, match="between 1 and 6, the number"):
        Engine().add(request("r", PROMPT, prompt_logprobs=0, prompt_logprobs_from=position))
