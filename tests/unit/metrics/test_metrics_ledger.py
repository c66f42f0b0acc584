"""Counts that several servers share, and that outlive a server."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import closing

import pytest
from metrics_fakes import instance, samples

from eagleray.errors import ConfigError
from eagleray.metrics.ledger import NAME_BYTES, NUM_RECORDS, RECORD_BYTES, Ledger

KILLED = """
import os, signal, sys
from pathlib import Path
from eagleray.metrics.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]), 0)
ledger.tally("answers", "200").add(5)
os.kill(os.getpid(), signal.SIGKILL)
"""


def add(directory, server, *name, amount=1.0):
    with closing(Ledger.open(directory, server)) as ledger:
        ledger.tally(*name).add(amount)


def total(directory, *name):
    with closing(Ledger.open(directory, 99)) as ledger:
        return ledger.totals()[name[0]].get(name[1:])


def test_ledger_killed_server_keeps_its_counts(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], timeout=60, check=False)
    assert run.returncode == -signal.SIGKILL
    assert total(tmp_path, "answers", "200") == 5
    add(tmp_path, 0, "answers", "200")  # its successor
    assert total(tmp_path, "answers", "200") == 6


def test_ledger_replacement_continues_the_file(tmp_path):
    add(tmp_path, 0, "a")
    add(tmp_path, 0, "b", "x", amount=0.5)
    with closing(Ledger.open(tmp_path, 0)) as successor:
        successor.tally("c").add()
        successor.tally("b", "x").add(0.25)
        totals = successor.totals()
        assert (totals["a"][()], totals["b"]["x",], totals["c"][()]) == (1, 0.75, 1)
        assert successor.processes() == {0: os.getpid()}
    assert len(list(tmp_path.iterdir())) == 1


def test_ledger_totals_sum_all_servers(tmp_path):
    with closing(Ledger.open(tmp_path, 0)) as one, closing(Ledger.open(tmp_path, 1)) as two:
        one.tally("a", "x").add(2)
        two.tally("b").add(7)
        two.tally("a", "x").add(3)
        for ledger in (one, two):
            totals = ledger.totals()
            assert (totals["a"]["x",], totals["b"][()]) == (5, 7)
            assert ledger.processes().keys() == {0, 1}


def test_ledger_names_with_any_characters_are_read_back(tmp_path):
    names = [("a", 'quote"', "new\nline", "ü", ""), ("a", 'quote"', "new\nline", "ü"), ("a",)]
    for place, name in enumerate(names):
        add(tmp_path, 0, *name, amount=place + 1)
    assert [total(tmp_path, *name) for name in names] == [1, 2, 3]


def test_ledger_half_written_name_is_ignored(tmp_path):
    add(tmp_path, 0, "a")
    with (tmp_path / "0").open("r+b") as file:
        file.seek(2 * RECORD_BYTES + 1)  # after the process id and "a": the first byte is missing
        file.write(b"#" * (NAME_BYTES - 1))
    assert total(tmp_path, "a") == 1
    add(tmp_path, 0, "b")
    assert (total(tmp_path, "a"), total(tmp_path, "b")) == (1, 1)


@pytest.mark.parametrize("size", [0, 1, RECORD_BYTES + 1])
def test_ledger_short_file_is_completed(tmp_path, size):
    (tmp_path / "0").write_bytes(bytes(size))
    assert total(tmp_path, "a") is None
    add(tmp_path, 0, "a")
    assert total(tmp_path, "a") == 1
    assert (tmp_path / "0").stat().st_size == NUM_RECORDS * RECORD_BYTES


def test_ledger_file_above_the_size_limit_is_refused(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30 * 1024, hard))
    try:
        with pytest.raises(ConfigError, match="`ulimit -f` says 30720 bytes"):
            Ledger.open(tmp_path / "metrics", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_ledger_scrape_during_start_sees_short_file(tmp_path):
    with instance(tmp_path) as make:
        one = make()
        (tmp_path / "1").touch()
        assert samples(one)["eagleray:requests_resumed_total",] == 0


def test_ledger_all_metrics_fit(tmp_path):
    """The test counts far more routes, methods and statuses than the application has."""
    with instance(tmp_path) as make:
        metrics = make()
        for place in range(40):
            for method in ("GET", "POST", "other"):
                for status in (200, 400, 401, 404, 405, 413, 429, 499, 500, 503, 504):
                    metrics.requests.http_answered(
                        f"/inference/v1/a_rather_long_route/{{number}}/{place}", method, status
                    )
        answered = [value for key, value in samples(metrics).items() if key[0] == "eagleray:http_requests_total"]
    assert answered == [1] * (40 * 3 * 11)
