"""Lengths and prompts of the requests that benchmarks send."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from eagleray.errors import UserError
from eagleray_bench.lengths import Shape, sharegpt_like
from eagleray_bench.workload import FIRST_TOKEN, Workload, as_text, make_jobs, max_model_len_of, vocab_size_of


def test_the_same_seed_gives_the_same_requests_and_another_does_not():
    def jobs(seed: int):
        return make_jobs(
            Workload(dataset="sharegpt-like", num_prompts=20, seed=seed).shapes(), vocab_size=500, seed=seed
        )

    assert jobs(1) == jobs(1)
    assert jobs(1) != jobs(2)


def test_lengths_without_a_range_are_those_that_were_asked_for():
    shapes = Workload(num_prompts=5, random_input_len=7, random_output_len=3).shapes()
    assert shapes == [Shape(num_input=7, num_output=3)] * 5


def test_a_range_is_reached_at_both_ends_and_never_left():
    shapes = Workload(num_prompts=500, random_input_len=10, random_output_len=4, random_range_ratio=0.5).shapes()
    assert {shape.num_input for shape in shapes} == set(range(5, 16))
    assert {shape.num_output for shape in shapes} == set(range(2, 7))


def test_sharegpt_like_has_the_means_that_its_docstring_gives():
    shapes = sharegpt_like(np.random.default_rng(0), 100_000)
    inputs = np.array([shape.num_input for shape in shapes])
    outputs = np.array([shape.num_output for shape in shapes])
    assert (inputs.min(), inputs.max(), outputs.min(), outputs.max()) == (4, 1024, 4, 1024)
    assert inputs.mean() == pytest.approx(145, rel=0.02)
    assert outputs.mean() == pytest.approx(311, rel=0.02)
    assert np.median(inputs) == pytest.approx(69, rel=0.03)
    assert np.median(outputs) == pytest.approx(225, rel=0.03)


def test_each_prefix_is_used_as_often_as_asked_for_and_shared_to_the_token():
    workload = Workload(
        dataset="prefix-repetition", num_prefixes=3, prefix_uses=4, prefix_len=6, random_input_len=2, max_len=None
    )
    jobs = make_jobs(workload.shapes(), vocab_size=50_000, seed=0)
    assert len(jobs) == workload.count == 12
    assert {len(job.prompt) for job in jobs} == {8}
    assert sorted(Counter(tuple(job.prompt[:6]) for job in jobs).values()) == [4, 4, 4]
    assert len({tuple(job.prompt[6:]) for job in jobs}) == 12
    order = [shape.prefix for shape in workload.shapes()]
    assert order != sorted(order), "the uses of a prefix are not one after another"


def test_requests_are_cut_to_what_the_model_can():
    workload = Workload(dataset="sharegpt-like", num_prompts=200).within(50)
    assert max(shape.num_input + shape.num_output for shape in workload.shapes()) == 50
    assert min(shape.num_output for shape in workload.shapes()) >= 1
    assert Shape(num_input=9, num_output=9, prefix=0, num_prefix=8).cut(4) == Shape(
        num_input=3, num_output=1, prefix=0, num_prefix=3
    )
    asked_for = Workload(random_input_len=100)
    assert asked_for.within(50) is asked_for, "what was asked for by a number is not changed silently"


def test_tokens_are_of_the_vocabulary_and_not_special():
    (job,) = make_jobs([Shape(num_input=2000, num_output=1)], vocab_size=20, seed=0)
    assert set(job.prompt) == set(range(FIRST_TOKEN, 20))


def test_words_are_alike_where_tokens_are():
    assert as_text([1, 2, 1]).split()[0] == as_text([1, 2, 1]).split()[2] != as_text([2])
    assert len(as_text(range(300)).split()) == 300


def test_numbers_of_a_checkpoint(tmp_path):
    assert vocab_size_of(tmp_path) is None
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 7}, "max_position_embeddings": 9}')
    assert (vocab_size_of(tmp_path), max_model_len_of(tmp_path)) == (7, 9)
    (tmp_path / "config.json").write_text("[]")
    assert vocab_size_of(tmp_path) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "other"}, "--dataset other: there is none of this name; there are random, sharegpt-like, prefix"),
        ({"num_prompts": 0}, "--num-prompts must be at least 1, but it is 0"),
        ({"random_input_len": -1}, "--random-input-len must be at least 1, but it is -1"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio must be at least 0 and below 1, but it is 1"),
        ({"max_len": 1}, "--max-len must be at least 2"),
        ({"seed": -1}, "--seed must be at least 0"),
        ({"dataset": "prefix-repetition", "num_prompts": 5, "num_prefixes": 2, "prefix_uses": 2}, "are 4 requests"),
    ],
)
def test_what_makes_no_sense_is_said_in_the_words_of_the_command_line(options, message):
    with pytest.raises(UserError, match=message):
        Workload(**options)


def test_a_vocabulary_must_have_tokens():
    with pytest.raises(UserError, match="more than 10 tokens, but has 10"):
        make_jobs([], vocab_size=10, seed=0)
