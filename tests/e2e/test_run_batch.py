"""`eagleray run-batch`: killed while it runs, and started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time

import pytest
from checkpoints import make_checkpoint

NUM_ROWS = 60
SECONDS = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_moe")


def command(checkpoint, source, target) -> list[str]:
    options = ["--num-threads", "1", "--max-model-len", "400", "--max-num-seqs", "4", "--log-level", "warning"]
    return [
        sys.executable,
        "-m",
        "eagleray",
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        str(checkpoint),
        *options,
    ]


def test_run_batch_killed_and_started_again_answers_every_row_once(checkpoint, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"prompt": "abc", "max_tokens": 100, "ignore_eos": True, "temperature": 0}
    rows = [
        {"custom_id": f"row-{n}", "method": "POST", "url": "/v1/completions", "body": body | {"prompt": f"abc {n}"}}
        for n in range(NUM_ROWS)
    ]
    rows.append({"custom_id": "chat", "url": "/v1/chat/completions", "body": {"messages": [], "max_tokens": 3}})
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with subprocess.Popen(command(checkpoint, source, target)) as first:
        deadline = time.monotonic() + SECONDS
        while not target.exists() or target.read_bytes().count(b"\n") < 5:
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.02)
        first.send_signal(signal.SIGKILL)
    num_before = target.read_bytes().count(b"\n")
    subprocess.run(command(checkpoint, source, target), check=True, timeout=120)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert num_before < NUM_ROWS
    assert sorted(answer["custom_id"] for answer in answers) == sorted(row["custom_id"] for row in rows)
    for answer in answers:
        if answer["custom_id"] == "chat":
            assert (answer["response"]["status_code"], answer["error"] is None) == (400, False)
        else:
            assert answer["response"]["body"]["usage"]["completion_tokens"] == 100
