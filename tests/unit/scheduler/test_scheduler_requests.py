"""Admission, finish, abort and failure of requests."""

from __future__ import annotations

import msgspec
import pytest
from scheduler_fakes import ALICE, BOB, Engine, request, undisturbed

from eagleray.errors import ConfigError, InvalidRequest, PromptTooLong
from eagleray.identity import EngineId
from eagleray.messages.outputs import EngineStats, FinishReason
from eagleray.messages.sampling import Sampling
from eagleray.messages.thinking import Thinking


def generated(prompt, count):
    """Return the tokens that the fake model generates after this prompt."""
    return undisturbed(request("r", prompt, max_tokens=count), max_model_len=1000)[0]


def test_scheduler_finished_request_leaves_nothing_behind():
    engine = Engine()
    engine.add(request("r", range(6), max_tokens=5))
    assert engine.scheduler.has_work
    engine.run()
    assert engine.tokens("r") == generated(range(6), 5)
    assert engine.last("r").finish_reason is FinishReason.LENGTH
    assert [len(chunk.token_ids) for chunk in engine.chunks[ALICE, "r"]] == [1] * 5
    assert not engine.scheduler.has_work and engine.plan() is None
    engine.check_all_free()


def test_request_eos_token_finishes_without_stop_token_id():
    tokens = generated([1, 2, 3], 6)
    engine = Engine()
    engine.add(request("r", [1, 2, 3], max_tokens=6, eos=(tokens[2],), stop=(tokens[2],)))
    engine.run()
    assert engine.tokens("r") == tokens[: tokens.index(tokens[2]) + 1]
    assert (engine.last("r").finish_reason, engine.last("r").stop_token_id) == (FinishReason.STOP, None)


def test_request_stop_token_finishes_with_its_id():
    tokens = generated([1, 2, 3], 6)
    engine = Engine()
    engine.add(request("r", [1, 2, 3], max_tokens=6, stop=(tokens[1],)))
    engine.run()
    assert engine.tokens("r") == tokens[: tokens.index(tokens[1]) + 1]
    assert (engine.last("r").finish_reason, engine.last("r").stop_token_id) == (FinishReason.STOP, tokens[1])


def test_request_eos_as_last_token_finishes_with_stop():
    tokens = generated([1, 2, 3], 1)
    engine = Engine()
    engine.add(request("r", [1, 2, 3], max_tokens=1, eos=tuple(tokens)))
    engine.run()
    assert engine.last("r").finish_reason is FinishReason.STOP


@pytest.mark.parametrize("ids", ["eos", "stop"])
def test_request_before_min_tokens_does_not_stop(ids):
    engine = Engine()
    engine.add(request("r", [1, 2, 3], max_tokens=6, min_tokens=4, **{ids: tuple(range(16))}))
    engine.run()
    assert engine.tokens("r") == generated([1, 2, 3], 4)
    assert engine.last("r").finish_reason is FinishReason.STOP


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_request_at_max_model_len_finishes_with_length(depth):
    engine = Engine(depth=depth, max_model_len=12, num_blocks=3)
    engine.add(request("r", range(9), max_tokens=100))
    engine.run()
    assert len(engine.tokens("r")) == 3 and engine.last("r").finish_reason is FinishReason.LENGTH
    # The last token is never computed: no plan goes beyond what the output needs.
    assert sum(sum(plan.num_tokens) for plan in engine.plans) == 11


def test_chunks_logprobs_of_result_are_forwarded():
    engine = Engine()
    engine.add(request("with", [1, 2], logprobs=0), request("without", [1, 2]))
    engine.run()
    for chunk in engine.chunks[ALICE, "with"]:
        assert [entry.token_ids for entry in chunk.logprobs] == [[token] for token in chunk.token_ids]
    assert all(chunk.logprobs == [] for chunk in engine.chunks[ALICE, "without"])


def test_admission_empty_prompt_is_refused():
    with pytest.raises(InvalidRequest, match="empty"):
        Engine().add(request("r", []))


@pytest.mark.parametrize("length", [32, 33])
def test_admission_prompt_too_long_error_names_both_numbers(length):
    engine = Engine(max_model_len=32)
    with pytest.raises(PromptTooLong, match=rf" 32 tokens.*{length} tokens"):
        engine.add(request("r", range(length)))
    assert not engine.scheduler.has_work
    engine.add(request("r", range(31)))


@pytest.mark.parametrize("bad", [-1, 2**31])
def test_admission_invalid_token_id_is_refused(bad):
    with pytest.raises(InvalidRequest, match="token ids"):
        Engine().add(request("r", [1, bad]))


def test_admission_max_tokens_zero_is_refused():
    with pytest.raises(InvalidRequest, match="max_tokens"):
        Engine().add(request("r", [1], max_tokens=0))


def test_scheduler_duplicate_request_id_of_a_client_is_refused():
    engine = Engine()
    engine.add(request("r", [1], max_tokens=2))
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        engine.add(request("r", [2]))
    engine.add(request("r", [2], client=BOB, max_tokens=3))
    engine.run()
    assert (len(engine.tokens("r")), len(engine.tokens("r", BOB))) == (2, 3)
    engine.scheduler.add(request("r", [3]))


def test_scheduler_cache_smaller_than_one_sequence_is_refused():
    with pytest.raises(ConfigError, match="give it 9 blocks, or set `max_model_len` to at most 32"):
        Engine(block_size=4, num_blocks=8, max_model_len=33)
    Engine(block_size=4, num_blocks=8, max_model_len=32)


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_waiting_and_running_requests_finish_alone(depth):
    engine = Engine(depth=depth, max_num_seqs=2)
    engine.add(*(request(name, [1, 2, 3], max_tokens=8) for name in ("a", "b", "waits", "other")))
    engine.step()
    outputs = engine.scheduler.abort(ALICE, ["a", "waits", "a", "nobody"])
    assert [(client, chunk.request_id, chunk.finish_reason) for client, chunk in outputs] == [
        (ALICE, "a", FinishReason.ABORT),
        (ALICE, "waits", FinishReason.ABORT),
    ]
    engine.receive(outputs)
    engine.run()
    assert engine.tokens("b") == engine.tokens("other") == generated([1, 2, 3], 8)
    assert engine.scheduler.abort(ALICE, ["a", "b"]) == []
    engine.check_all_free()


def test_abort_same_id_of_other_client_is_kept():
    engine = Engine()
    engine.add(request("r", [1]), request("r", [1], client=BOB))
    engine.receive(engine.scheduler.abort(BOB, ["r"]))
    engine.run()
    assert engine.last("r").finish_reason is FinishReason.LENGTH
    assert engine.last("r", BOB).finish_reason is FinishReason.ABORT


def test_plan_after_abort_names_freed_rows():
    engine = Engine()
    engine.add(request("a", [1, 2, 3], max_tokens=8), request("b", [4], max_tokens=8))
    engine.step()
    engine.receive(engine.scheduler.abort(ALICE, ["a"]))
    engine.add(request("c", [7]))
    plan = engine.plan()
    assert plan.freed_rows == [0] and [(start.row, start.request_id) for start in plan.new_rows] == [(0, "c")]


def test_abort_client_its_requests_end_without_chunks():
    engine = Engine(max_num_seqs=2)
    engine.add(*(request(str(index), [1, 2], client=BOB) for index in range(3)), request("mine", [1, 2]))
    engine.step()
    assert engine.scheduler.abort_client(BOB) == 3
    assert engine.scheduler.abort_client(BOB) == 0
    engine.run()
    assert len(engine.tokens("mine")) == 4
    assert all(len(engine.chunks[BOB, str(index)]) <= 1 for index in range(3))
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_apply_failed_row_fails_its_request_alone(depth):
    engine = Engine(depth=depth)
    engine.add(*(request(name, range(10), max_tokens=6) for name in ("good", "bad")))
    engine.step()
    engine.worker.failing.add("bad")
    engine.run()
    assert (engine.last("bad").finish_reason, engine.last("bad").error) == (FinishReason.ERROR, "no token is allowed")
    assert engine.tokens("good") == generated(range(10), 6)
    engine.check_all_free()


@pytest.mark.parametrize("depth", [1, 2])
def test_apply_failed_row_blocks_are_not_cached(depth):
    engine = Engine(depth=depth)
    engine.worker.failing.add("bad")
    engine.add(request("bad", range(10)))
    engine.run()
    engine.add(request("again", range(10)))
    engine.run()
    assert engine.chunks[ALICE, "again"][0].num_cached_tokens == 0


def test_apply_failure_after_abort_blocks_are_not_cached():
    engine = Engine()
    engine.worker.failing.add("bad")
    engine.add(request("bad", range(10)))
    engine.plan()
    engine.receive(engine.scheduler.abort(ALICE, ["bad"]))
    assert engine.apply() == []
    engine.add(request("again", range(10)))
    engine.run()
    assert engine.last("again").finish_reason is FinishReason.LENGTH
    assert engine.chunks[ALICE, "again"][0].num_cached_tokens == 0


def test_stats_fields_equal_engine_stats():
    engine = Engine(max_num_seqs=1, block_size=4, num_blocks=32)
    engine.add(request("a", range(9), max_tokens=3), request("b", range(9), max_tokens=3))
    engine.step()
    now = engine.scheduler.stats()
    assert (now.num_running, now.num_waiting, now.num_kv_blocks, now.num_free_kv_blocks) == (1, 1, 32, 29)
    engine.run()
    stats = EngineStats(engine=EngineId("test", 0), **msgspec.structs.asdict(engine.scheduler.stats()))
    assert (stats.num_running, stats.num_waiting, stats.num_free_kv_blocks) == (0, 0, 32)
    assert (stats.num_steps, stats.num_preemptions, stats.num_generation_tokens) == (6, 0, 6)
    assert (stats.num_prefix_queries, stats.num_prefix_hits, stats.num_prompt_tokens) == (18, 8, 10)


@pytest.mark.parametrize(
    "sampling",
    [
        {"logit_bias": {16: 1.0}},
        {"allowed_token_ids": (0, 16)},
        {"suppressed_token_ids": (-1,)},
        {"thinking": Thinking(end=(10**9,))},
        {"thinking": Thinking(end=(1,), starts=((1,), (2, -1)))},
        {"logprob_token_ids": (99,)},
        {"bad_words": ((1,), (2, 16))},
        {"logprobs": 17},
        {"prompt_logprobs": -1},
        {"temperature": float("nan")},
        {"repetition_penalty": float("inf")},
    ],
)
def test_admission_harmful_sampling_parameter_is_refused_by_name(sampling):
    engine = Engine(vocab_size=16)
    message = msgspec.structs.replace(request("r", [1, 2]), sampling=Sampling(seed=0, **sampling))
    (name,) = sampling
    with pytest.raises(InvalidRequest, match=name) as refused:
        engine.add(message)
    assert refused.value.param == name
    assert not engine.scheduler.has_work


def test_admission_sampling_parameters_at_limits_are_accepted():
    sampling = Sampling(seed=0, logit_bias={15: 1.0}, bad_words=((0, 15),), logprobs=16, logprob_token_ids=(0, 15))
    engine = Engine(vocab_size=16)
    engine.add(msgspec.structs.replace(request("r", [0, 15]), sampling=sampling))
    assert engine.scheduler.has_work
