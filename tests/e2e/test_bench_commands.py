"""`eagleray bench`: each benchmark measures a small checkpoint and reports its figures."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from checkpoints import make_checkpoint
from serving import run_program, serve

from eagleray.cli.main import main


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3"))


@pytest.fixture(scope="module")
def server(checkpoint):
    options = ("--served-model-name", "small", "--max-model-len", "200", "--enable-prompt-tokens-details")
    with serve(checkpoint, *options) as server:
        yield server


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_program("bench", *arguments, timeout=120)


def figures(path: Path, *arguments: str) -> Any:
    """Run a benchmark and return the figures that it wrote as JSON."""
    run = bench(*arguments, "--json", str(path))
    assert run.returncode == 0, run.stderr
    return json.loads(path.read_text())["figures"]


@pytest.mark.parametrize("endpoint", [pytest.param("/v1/completions", marks=pytest.mark.grid), "/v1/chat/completions"])
def test_serve_writes_figures_and_a_plot(server, tmp_path, endpoint):
    plot = tmp_path / "plot.svg"
    arguments = ("--num-prompts", "6", "--random-input-len", "60", "--random-output-len", "5", "--plot", str(plot))
    found = figures(tmp_path / "f.json", "serve", "--base-url", server.url, "--endpoint", endpoint, *arguments)
    assert (found["num_completed"], found["failures"], found["num_short"]) == (6, [], 0)
    assert found["num_output_tokens"] == 30
    if endpoint == "/v1/completions":  # of a chat only the server knows how long it gets
        assert found["num_input_tokens"] == 360
        gaps = found["itl_ms"]
        assert gaps is None or gaps["count"] <= 6 * 4, "tokens without a text of their own have no event but the first"
    else:
        assert found["num_input_tokens"] == pytest.approx(360, rel=0.25)
    assert 0 < found["ttft_ms"]["p50"] <= found["e2e_ms"]["p50"]
    assert found["tpot_ms"]["count"] == 6
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")


def test_serve_repeated_prefixes_hit_the_cache(server, tmp_path):
    arguments = ("--dataset", "prefix-repetition", "--num-prefixes", "1", "--prefix-uses", "3", "--prefix-len", "64")
    lengths = ("--random-input-len", "4", "--random-output-len", "2", "--max-concurrency", "1", "--seed", "5")
    found = figures(tmp_path / "f.json", "serve", "--base-url", server.url, *arguments, *lengths)
    assert found["num_cached_tokens"] == 2 * 64
    assert found["peak_concurrency"] == 1


def test_serve_failing_requests_are_counted_as_failures(server, tmp_path):
    """Some of the prompts are too long for the model."""
    lengths = ("--random-input-len", "190", "--random-range-ratio", "0.5", "--random-output-len", "2")
    some = figures(
        tmp_path / "f.json", "serve", "--base-url", server.url, *lengths, "--num-warmups", "0", "--num-prompts", "12"
    )
    (failure,) = some["failures"]
    assert failure["kind"] == "HTTP 400"
    assert "maximum context length is 200 tokens" in failure["example"]
    assert some["num_completed"] + failure["count"] == 12 and some["num_completed"] > 0
    none = bench("serve", "--base-url", server.url, "--random-input-len", "300", "--num-warmups", "0")
    assert none.returncode == 1
    assert "0 completed, 100 failed" in none.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["serve", "--base-url", "http://127.0.0.1:9"], 1, "no server answers at http://127.0.0.1:9"),
        (["serve", "--model", "big"], 2, "--model big: not served at"),
        (["serve", "--request-rate", "-1"], 2, "--request-rate must be greater than 0"),
        (["serve", "--dataset", "other"], 2, "--dataset other: there is none of this name"),
        (["serve", "--plot", "a.png"], 2, "only .svg is supported"),
        (["serve", "--json", "/no/such/directory/a.json"], 2, "no file can be written there"),
        (["serve", "--random-input-len", "500"], 1, "the first request to"),
        (["throughput", "/no/such/model"], 2, "there is no such directory"),
        (["throughput", "--num-prompts", "0"], 2, "--num-prompts must be at least 1"),
        (["throughput", "--routed-experts", "--rounds", "0"], 2, "--rounds must be at least 1"),
        (["latency", "--output-len", "1"], 2, "--output-len must be at least 2"),
        (["startup", "--repeat", "0"], 2, "--repeat must be at least 1"),
        (["startup", "/no/such/model"], 2, "there is no such directory"),
        (["scheduler", "--steps", "0"], 2, "--steps and --requests must be at least 1"),
    ],
)
def test_bench_mistake_is_one_sentence_and_an_exit_code(server, arguments, code, message, capsys):
    if arguments[0] == "serve" and "--base-url" not in arguments:
        arguments = [*arguments, "--base-url", server.url]
    assert main(["bench", *arguments]) == code
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.grid  # the next test has the command, too
def test_throughput_writes_figures(checkpoint, tmp_path):
    lengths = ("--num-prompts", "4", "--random-input-len", "10", "--random-output-len", "3", "--num-threads", "1")
    found = figures(tmp_path / "f.json", "throughput", checkpoint, *lengths)
    assert (found["num_requests"], found["num_input_tokens"], found["num_output_tokens"]) == (4, 40, 12)
    assert found["output_tokens_per_s"] == pytest.approx(12 / found["duration_s"])
    assert found["total_tokens_per_s"] == pytest.approx(52 / found["duration_s"])


def test_throughput_routed_experts_measures_with_and_without(tmp_path):
    checkpoint = make_checkpoint(tmp_path / "moe", "qwen3_moe")
    lengths = ("--num-prompts", "4", "--random-input-len", "10", "--random-output-len", "3", "--num-threads", "1")
    rounds = ("--routed-experts", "--rounds", "2")
    found = figures(tmp_path / "f.json", "throughput", str(checkpoint), *rounds, *lengths)
    assert [len(found[name]) for name in ("without", "reporting")] == [2, 2]
    assert {one["num_output_tokens"] for one in (*found["without"], *found["reporting"])} == {12}
    assert (found["num_rows"], found["bytes_per_row"]) == (4 * 12, 3 * 3)
    assert found["ratio"] > 0


def test_latency_writes_figures_and_a_plot(checkpoint, tmp_path):
    plot = tmp_path / "plot.svg"
    lengths = ("--batch-size", "2", "--input-len", "6", "--output-len", "4", "--iterations", "3", "--warm-up", "1")
    options = ("--num-threads", "1", "--plot", str(plot))
    found = figures(tmp_path / "f.json", "latency", checkpoint, *lengths, *options)
    assert [found[name]["count"] for name in ("ttft_ms", "tpot_ms", "e2e_ms")] == [3, 3, 3]
    assert found["ttft_ms"]["lowest"] > 0
    assert plot.exists()
    too_long = bench("latency", checkpoint, "--max-model-len", "16", "--input-len", "10", "--output-len", "10")
    assert too_long.returncode == 2
    assert "10 tokens in and 10 out do not fit into the model's length" in too_long.stderr


@pytest.mark.slow  # it starts a program and a server twice
def test_startup_measures_program_and_server(checkpoint, tmp_path):
    program, server = figures(tmp_path / "f.json", "startup", checkpoint, "--repeat", "1", "--num-threads", "1")
    assert (program["kind"], server["kind"]) == ("program", "server")
    for start in (program, server):
        assert 0 < start["ready_s"]["p50"] < start["answered_s"]["p50"]
    failed = bench("startup", checkpoint, "--what", "server", "--repeat", "1", "--max-model-len", "999999")
    assert failed.returncode == 1
    assert "`max_model_len`: 999999 is longer than" in failed.stderr


def test_scheduler_writes_figures_of_each_kind(tmp_path):
    found = figures(tmp_path / "f.json", "scheduler", "--requests", "1", "4", "--steps", "30", "--kinds", "mixed")
    assert [(one["kind"], one["num_requests"]) for one in found] == [("mixed", 1), ("mixed", 4)]
    assert all(one["both_us"]["count"] == 30 for one in found)
