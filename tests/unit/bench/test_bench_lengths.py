"""Lengths and prompts of the requests that benchmarks send."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from eagleray.errors import UserError
from eagleray_bench.lengths import RequestShape, sharegpt_like
from eagleray_bench.workload import FIRST_TOKEN, Workload, as_text, make_requests, max_model_len_of, vocab_size_of


def test_make_requests_same_seed_gives_the_same_requests():
    def requests(seed: int):
        return make_requests(
            Workload(dataset="sharegpt-like", num_prompts=20, seed=seed).shapes(), vocab_size=500, seed=seed
        )

    assert requests(1) == requests(1)
    assert requests(1) != requests(2)


def test_shapes_without_a_range_have_the_given_lengths():
    shapes = Workload(num_prompts=5, random_input_len=7, random_output_len=3).shapes()
    assert shapes == [RequestShape(num_input=7, num_output=3)] * 5


def test_shapes_with_a_range_reach_both_its_ends():
    shapes = Workload(num_prompts=500, random_input_len=10, random_output_len=4, random_range_ratio=0.5).shapes()
    assert {shape.num_input for shape in shapes} == set(range(5, 16))
    assert {shape.num_output for shape in shapes} == set(range(2, 7))


def test_sharegpt_like_has_the_documented_means():
    shapes = sharegpt_like(np.random.default_rng(0), 100_000)
    inputs = np.array([shape.num_input for shape in shapes])
    outputs = np.array([shape.num_output for shape in shapes])
    assert (inputs.min(), inputs.max(), outputs.min(), outputs.max()) == (4, 1024, 4, 1024)
    assert inputs.mean() == pytest.approx(145, rel=0.02)
    assert outputs.mean() == pytest.approx(311, rel=0.02)
    assert np.median(inputs) == pytest.approx(69, rel=0.03)
    assert np.median(outputs) == pytest.approx(225, rel=0.03)


def test_prefix_repetition_shares_each_prefix_the_given_number_of_times():
    workload = Workload(
        dataset="prefix-repetition", num_prefixes=3, prefix_uses=4, prefix_len=6, random_input_len=2, max_len=None
    )
    requests = make_requests(workload.shapes(), vocab_size=50_000, seed=0)
    assert len(requests) == workload.count == 12
    assert {len(request.prompt) for request in requests} == {8}
    assert sorted(Counter(tuple(request.prompt[:6]) for request in requests).values()) == [4, 4, 4]
    assert len({tuple(request.prompt[6:]) for request in requests}) == 12
    order = [shape.prefix for shape in workload.shapes()]
    assert order != sorted(order), "the uses of a prefix are not one after another"


def test_within_model_length_cuts_drawn_lengths():
    workload = Workload(dataset="sharegpt-like", num_prompts=200).within(50)
    assert max(shape.num_input + shape.num_output for shape in workload.shapes()) == 50
    assert min(shape.num_output for shape in workload.shapes()) >= 1
    assert RequestShape(num_input=9, num_output=9, prefix=0, num_prefix=8).cut(4) == RequestShape(
        num_input=3, num_output=1, prefix=0, num_prefix=3
    )
    asked_for = Workload(random_input_len=100)
    assert asked_for.within(50) is asked_for, "what was asked for by a number is not changed silently"


def test_make_requests_tokens_are_of_the_vocabulary_and_not_special():
    (request,) = make_requests([RequestShape(num_input=2000, num_output=1)], vocab_size=20, seed=0)
    assert set(request.prompt) == set(range(FIRST_TOKEN, 20))


def test_as_text_equal_tokens_give_equal_words():
    assert as_text([1, 2, 1]).split()[0] == as_text([1, 2, 1]).split()[2] != as_text([2])
    assert len(as_text(range(300)).split()) == 300


def test_vocab_size_of_and_max_model_len_of_read_config_json(tmp_path):
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
def test_workload_impossible_value_raises_with_the_flag(options, message):
    with pytest.raises(UserError, match=message):
        Workload(**options)


def test_make_requests_vocabulary_without_tokens_raises():
    with pytest.raises(UserError, match="more than 10 tokens, but has 10"):
        make_requests([], vocab_size=10, seed=0)
