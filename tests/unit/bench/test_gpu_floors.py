"""The least time of a model's steps, against figures that were computed by hand."""

from __future__ import annotations

import dataclasses

import pytest
from gpu_floors import (
    BF16_BYTES,
    DeviceRates,
    RowWork,
    WeightBytes,
    Work,
    _pairs,
    decode_rows,
    expected_experts,
    step_work,
    throughput_seconds,
)
from gpu_shapes import SHAPES, write_config

from eagleray.models.config_file import ConfigFile
from eagleray.models.registry import find_family
from eagleray.models.size import num_parameters

H200 = DeviceRates(read=4.3e12, products=790e12)


@pytest.fixture
def spec_of(tmp_path):
    def read(name, **options):
        config = ConfigFile.read(write_config(tmp_path, name, **options))
        return find_family(config).read_spec(config)

    return read


@pytest.mark.parametrize(
    ("name", "billions"), [("qwen3-8b", 8.2), ("qwen3-0.6b", 0.60), ("qwen3-30b-a3b", 30.5), ("gpt-oss-20b", 20.9)]
)
def test_shapes_have_the_published_number_of_parameters(spec_of, name, billions):
    assert num_parameters(spec_of(name)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_can_be_small(spec_of, name):
    assert num_parameters(spec_of(name, is_small=True)) < 500_000


@pytest.mark.parametrize(
    ("name", "is_fp8", "gigabytes", "milliseconds"),
    [
        ("qwen3-8b", False, 15.1, 3.52),
        ("qwen3-8b", True, 8.2, 1.90),
        ("qwen3-0.6b", False, 1.19, 0.28),
        ("qwen3-30b-a3b", False, 6.1, 1.41),
        ("gpt-oss-20b", False, 3.7, 0.86),
    ],
)
def test_step_work_one_row_reads_its_weights_once(spec_of, name, is_fp8, gigabytes, milliseconds):
    spec = spec_of(name)
    products = step_work(spec, decode_rows(1, 1024), weights=WeightBytes.of(spec, is_fp8=is_fp8)).products
    assert products.num_bytes / 1e9 == pytest.approx(gigabytes, rel=0.01)
    assert products.seconds(H200) * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_step_work_mxfp4_as_bfloat16_is_larger(spec_of):
    work = step_work(spec_of("gpt-oss-20b"), decode_rows(1, 1024), weights=WeightBytes())
    assert work.products.num_bytes / 1e9 == pytest.approx(7.2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "of_32", "of_256"), [("qwen3-8b", 1.12, 8.99), ("qwen3-0.6b", 0.87, 6.99), ("qwen3-30b-a3b", 0.75, 5.99)]
)
def test_step_work_decodes_read_keys_and_values_of_all_rows(spec_of, name, of_32, of_256):
    spec = spec_of(name)
    for num_rows, milliseconds in ((32, of_32), (256, of_256)):
        attention = step_work(spec, decode_rows(num_rows, 1024)).attention
        assert attention.seconds(H200) * 1e3 == pytest.approx(milliseconds, rel=0.01)


def test_step_work_windows_halve_the_keys(spec_of):
    spec = spec_of("gpt-oss-20b")
    full = dataclasses.replace(spec, windows=(None,) * spec.num_layers)
    read, all_read = (step_work(one, decode_rows(32, 1024)).attention.num_bytes for one in (spec, full))
    assert all_read / 4.3e12 * 1e3 == pytest.approx(0.37, rel=0.02)
    assert read / all_read == pytest.approx((1 + 128 / 1024) / 2)


def test_step_work_experts_of_32_rows_are_most_experts(spec_of):
    spec = spec_of("qwen3-30b-a3b")
    assert expected_experts(128, 8, 32) == pytest.approx(112, abs=0.5)
    assert expected_experts(128, 8, 1) == 8
    products = step_work(spec, decode_rows(32, 1024)).products
    assert products.num_bytes / 1e9 == pytest.approx(53, rel=0.01)
    assert products.seconds(H200) * 1e3 == pytest.approx(12.4, rel=0.01)
    few = step_work(spec, decode_rows(32, 1024), num_used_experts=8).products
    assert few.num_bytes == step_work(spec, decode_rows(1, 1024)).products.num_bytes


def test_step_work_prompt_is_bound_by_operations(spec_of):
    spec = spec_of("qwen3-8b")
    work = step_work(spec, [RowWork(8192, 0)])
    assert (work.products.operations + work.attention.operations) / 1e12 == pytest.approx(134, rel=0.01)
    assert work.seconds(H200) == pytest.approx(0.17, rel=0.01)
    chunks = [step_work(spec, [RowWork(4096, cached)]) for cached in (0, 4096)]
    assert sum(chunk.attention.operations for chunk in chunks) == pytest.approx(work.attention.operations)


def test_throughput_seconds_are_those_of_prompts_and_steps(spec_of):
    spec = spec_of("qwen3-8b")
    assert step_work(spec, decode_rows(256, 1500)).seconds(H200) * 1e3 == pytest.approx(18.1, rel=0.01)
    seconds = throughput_seconds(spec, H200, num_requests=256, num_prompt=1000, num_output=1000)
    assert 256_000 / seconds == pytest.approx(11_000, rel=0.05)


@pytest.mark.parametrize("num_cached", [0, 3, 9])
@pytest.mark.parametrize("window", [1, 4, 7, 100])
def test_pairs_of_a_window_are_the_keys_that_each_query_sees(num_cached, window):
    expected = sum(min(window, num_cached + query + 1) for query in range(8))
    assert _pairs(RowWork(8, num_cached), window) == expected


def test_work_takes_the_longer_of_bytes_and_operations():
    rates = DeviceRates(read=10.0, products=100.0)
    assert Work(num_bytes=20.0, operations=100.0).seconds(rates) == 2.0
    assert Work(num_bytes=20.0, operations=500.0).seconds(rates) == 5.0
    assert WeightBytes().layers == BF16_BYTES
