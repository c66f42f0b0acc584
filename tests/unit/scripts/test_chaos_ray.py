"""The Ray cluster that `make chaos` maintains on one host."""

from __future__ import annotations

from pathlib import Path

import chaos_ray
import pytest
from chaos_server import ChaosFailed


def test_start_node_does_not_start_shows_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A program plays `ray start`. No two nodes share the directory in which Ray chooses names for sockets."""
    ready = 'case "$*" in *ray-2*) echo raylet aborted;; *) echo Ray runtime started;; esac'
    program = tmp_path / "ray"
    program.write_text(f'#!/bin/sh\necho "$@"\n{ready}\nexec sleep 60\n')
    program.chmod(0o755)
    monkeypatch.setattr(chaos_ray.sys, "executable", str(program))
    monkeypatch.setattr(chaos_ray, "_own_address", lambda: "127.0.0.1")
    monkeypatch.setattr(chaos_ray, "START_SECONDS", 2.0)
    cluster = chaos_ray.RayCluster(tmp_path, num_engines=2)
    try:
        with pytest.raises(ChaosFailed, match=r"(?s)^Ray has not started 1 of its nodes .*raylet aborted"):
            cluster.start()
        starts = [(tmp_path / f"ray-node-{number}.log").read_text().splitlines()[0] for number in range(3)]
    finally:
        cluster.close()
    directories = [start.partition("--temp-dir ")[2].partition(" ")[0] for start in starts]
    assert len(set(directories)) == len(directories)
