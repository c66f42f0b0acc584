"""Parts of `benchmarks/peers.py` without its engines: rows, jobs, memory, tables."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture
def load(monkeypatch):
    """Import a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def test_peer_rows_all_have_unique_names_and_measured_figures(load):
    rows = list(load("peer_rows").all_rows())
    offline = {*load("measure_offline").FIGURES, "ready_s", "peak_anonymous_mib"}
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        if row.job.is_http:
            streams, _, what = row.figure.partition("/")
            assert int(streams) in load("peer_jobs").NUM_PROMPTS
            assert what in load("peer_rows").HTTP
        else:
            assert row.figure in offline


def test_choose_names_and_patterns_gives_matching_rows(load):
    choose = load("peer_rows").choose
    assert [row.name for row in choose(["moe-tiny/ep2/token", "dense-tiny/tp2/*32"])] == [
        "dense-tiny/tp2/batch32",
        "moe-tiny/ep2/token",
    ]
    usual = {row.name for row in choose(load("peer_rows").USUAL)}
    assert {"dense-0.6b/token", "dense-0.6b/long-token", "dense-tiny/memory", "dense-tiny/http32/tpot-p99"} <= usual
    with pytest.raises(SystemExit, match="--rows dense-tiny/ep2/token: no row has such a name"):
        choose(["dense-tiny/ep2/token"])


def test_can_llama_neither_http_nor_parallel(load):
    engine, job = load("peer_engines").PeerEngine, load("peer_rows").PeerJob
    assert not engine("llama.cpp").can(job("dense-tiny", is_http=True))
    assert not engine("limit").can(job("dense-tiny", is_http=True))
    assert not engine("llama.cpp").can(job("dense-tiny", parallel="tp2"))
    assert engine("llama.cpp").can(job("dense-tiny", is_long=True))
    assert engine("vllm").can(job("dense-tiny", is_http=True))


def test_engine_options_and_environment_fit_the_engine(load):
    options = load("peer_rows").PeerJob("moe-tiny", parallel="ep2").options
    vllm = load("peer_engines").PeerEngine("vllm", preload=["a.so", "b.so"])
    assert vllm.options(options) == options | {"distributed_executor_backend": "mp"}
    assert vllm.environment(options)["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert vllm.environment({})["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert vllm.environment({})["LD_PRELOAD"] == "a.so:b.so"
    eagleray = load("peer_engines").PeerEngine("eagleray")
    assert eagleray.options(options) == options | {"kv_cache_memory": "1GiB"}  # as much as vLLM gets
    assert eagleray.environment(options) == dict(os.environ)


def test_table_has_medians_ratios_and_gaps(load):
    (token, prompt) = load("peer_rows").choose(["dense-tiny/token", "dense-tiny/prompt"])
    engine = load("peer_engines").PeerEngine
    figures = {(token.name, "eagleray"): [1.0, 9.0, 2.0], (token.name, "vllm"): [4.0]}
    peers = load("peers")
    lines = peers.table([token, prompt], [engine("eagleray"), engine("vllm")], figures).splitlines()
    assert lines[2] == "| dense-tiny/token | 1 request, ms per token | 2.00 | 4.00 | 0.50 |"
    assert lines[3] == "| dense-tiny/prompt | prompt of 1,024, tokens/s (higher is better) | – | – | – |"
    content = peers.as_json([token], [engine("eagleray"), engine("vllm")], figures, ["why"])
    assert json.loads(json.dumps(content))["rows"][token.name]["ratios"] == {"vllm": 0.5}


class FakeEngine:
    """An engine that records the figures asked of it and fails at one of them."""

    def __init__(self, name, said, failed):
        self.name, self.said, self.failed = name, said, failed

    def measure(self, figures, turn):
        self.said.append((turn, self.name, figures))
        if self.name == "vllm" and figures == ["batch32_s"]:
            raise self.failed("it did not answer")
        return dict.fromkeys(figures, 1.0)

    def close(self):
        self.said.append((self.name, "closed"))


def test_measure_all_engines_alternate_and_a_failed_one_is_left_out(load, tmp_path, monkeypatch):
    peers, engine, said = load("peers"), load("peer_engines").PeerEngine, []
    failed = load("peer_jobs").JobFailed

    def open_job(job, engine, checkpoint):
        if engine.name == "llama.cpp":
            raise failed("it did not start")
        return FakeEngine(engine.name, said, failed)

    monkeypatch.setattr(peers, "open_job", open_job)
    monkeypatch.setattr(load("peer_engines"), "make", lambda model, directory: directory / model)
    monkeypatch.setattr(load("peer_engines"), "convert", lambda path, file: None)
    rows = load("peer_rows").choose(["dense-tiny/token", "dense-tiny/batch32"])
    engines = [engine("eagleray"), engine("vllm"), engine("llama.cpp")]
    figures, failures = {}, []
    peers.measure_all(rows, engines, 2, tmp_path, figures, failures)
    assert said == [
        (0, "eagleray", ["token_ms"]),
        (0, "vllm", ["token_ms"]),
        (0, "eagleray", ["batch32_s"]),
        (0, "vllm", ["batch32_s"]),
        (1, "eagleray", ["token_ms"]),
        (1, "eagleray", ["batch32_s"]),
        ("vllm", "closed"),
        ("eagleray", "closed"),
    ]
    assert failures == [
        "llama.cpp failed at dense-tiny, offline: it did not start",
        "vllm failed at dense-tiny, offline: it did not answer",
    ]
    assert figures["dense-tiny/token", "vllm"] == [1.0]
    assert figures["dense-tiny/batch32", "eagleray"] == [1.0, 1.0]


def test_step_seconds_is_the_slower_of_reading_and_multiplying(load, tmp_path):
    limit = load("measure_limit")
    config = {"hidden_size": 8, "head_dim": 4, "num_hidden_layers": 3, "num_attention_heads": 2, "vocab_size": 100}
    config |= {"num_key_value_heads": 1, "intermediate_size": 16, "moe_intermediate_size": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_local_experts": 8, "num_experts_per_tok": 2}))
    model = limit.ModelSizes(tmp_path)
    attention, expert, head = 8 * (8 + 8 + 4 + 4), 3 * 8 * 4, 8 * 100
    reading = 2 * (3 * (attention + 2 * expert) + head + 3 * 10 * 8)  # bytes: two experts, and a cache of 10 tokens
    multiplying = 2 * (3 * (attention + 2 * expert) + head + 3 * 11 * 2 * 8)
    step = {"rows": 1, "tokens": 1, "context": 10}
    assert model.step_seconds(limit.MachineLimits(1.0, 1e9), **step) == reading
    assert model.step_seconds(limit.MachineLimits(1e9, 1.0), **step) == multiplying
    many = model.step_seconds(limit.MachineLimits(1.0, 1e9), rows=16, tokens=1, context=0)
    assert many == 2 * (3 * (attention + 8 * expert) + head)  # there are no more than eight
    assert limit.FIGURES.keys() == load("measure_offline").FIGURES.keys()


def test_groups_one_load_is_measured_together_and_memory_last(load):
    rows = load("peer_rows")
    http = rows.choose(["dense-tiny/http1/*", "dense-tiny/http8/*"])
    assert [len(group) for group in http[0].job.groups(http)] == [5, 5]
    offline = rows.choose(["dense-tiny/memory", "dense-tiny/token"])
    assert [row.name for (row,) in offline[0].job.groups(offline)] == ["dense-tiny/token", "dense-tiny/memory"]


def test_tree_includes_descendants_and_anonymous_bytes_are_per_process(load):
    code = (
        "import subprocess, sys\n"
        "held = bytearray(50_000_000); held[::4096] = b'x' * len(held[::4096])\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE)\n"
        "print(grandchild.pid, flush=True); sys.stdin.read()\n"
    )
    wait = "import sys; sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code, wait], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        memory = load("process_memory")
        grandchild = int(child.stdout.readline())
        assert memory.tree(child.pid) == [child.pid, grandchild]
        assert memory.anonymous_bytes(child.pid) > 50_000_000 > memory.anonymous_bytes(grandchild)
        child.stdin.close()
    assert memory.anonymous_bytes(child.pid) == 0


PLOTTED = {
    "a/token": {"higher_is_better": False, "medians": {"eagleray": 2.0, "vllm": 3.0, "llama.cpp": 1.0, "limit": 1.0}},
    "a/prompt": {"higher_is_better": True, "medians": {"eagleray": 30.0, "vllm": 20.0, "limit": 40.0}},
    "a/memory": {"higher_is_better": False, "medians": {"eagleray": 5.0}},
}


def test_plotted_bars_are_shares_of_the_limit_and_factors_against_peers(load):
    plot = load("plot_peers")
    assert plot.shares(PLOTTED) == [
        ("a/token", {"eagleray": 0.5, "vllm": 1 / 3, "llama.cpp": 1.0}),
        ("a/prompt", {"eagleray": 0.75, "vllm": 0.5}),
    ]
    assert plot.factors(PLOTTED) == [("a/token", {"vllm": 1.5, "llama.cpp": 0.5}), ("a/prompt", {"vllm": 1.5})]


def test_plot_draws_chosen_rows(load, tmp_path):
    (tmp_path / "figures.json").write_text(json.dumps({"rows": PLOTTED}))
    paths = {name: tmp_path / f"{name}.svg" for name in ("limits", "factors")}
    options = [f"--{name}={path}" for name, path in paths.items()]
    load("plot_peers").main([str(tmp_path / "figures.json"), "--rows", "*/token", *options])
    for path in paths.values():
        assert ">a/token<" in path.read_text()
        assert ">a/prompt<" not in path.read_text()
