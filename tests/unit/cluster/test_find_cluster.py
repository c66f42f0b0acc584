"""The search for a Ray cluster, where none runs or has been recorded by `ray start`."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from ray._private import services

from eagleray.cluster import connect
from eagleray.cluster.local_cluster import list_running_clusters
from eagleray.errors import ClusterError

ADDRESS = "192.0.2.1:6379"


@contextmanager
def raylet(session_dir: str) -> Iterator[None]:
    """Run a process that looks like a raylet."""
    command = ["/somewhere/raylet", "-c", "echo; read", f"--session_dir={session_dir}", f"--gcs-address={ADDRESS}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, executable="/bin/bash", **pipes) as process:
        assert process.stdout is not None
        process.stdout.readline()  # until then the system may show no command line of it
        yield
        process.communicate()


@pytest.mark.parametrize(
    ("session_dir", "is_listed"), [("/tmp/x/session_1", True), ("/tmp/eagleray-abcdefgh.run/session_1", False)]
)
def test_list_running_clusters_has_those_that_no_instance_started_for_itself(session_dir: str, is_listed: bool) -> None:
    assert ADDRESS not in list_running_clusters()
    with raylet(session_dir):
        assert (ADDRESS in list_running_clusters()) == is_listed


def test_find_cluster_that_is_not_recorded_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(services, "canonicalize_bootstrap_address", lambda address: None)
    monkeypatch.setattr(connect, "list_running_clusters", lambda: [ADDRESS])
    assert connect.find_cluster(None) is None
    assert f"a Ray cluster runs here at {ADDRESS}, but its address is not recorded" in caplog.text


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("127.0.0.1:1", "Ray cluster 127.0.0.1:1: cannot be reached (Connection refused)"),
        ("ray://127.0.0.1:10001", "Ray address ray://127.0.0.1:10001: Ray Client is not supported"),
        ("nonsense", "Ray address 'nonsense' is not host:port, auto or local"),
    ],
)
@pytest.mark.parametrize("option", [None, "auto"])
def test_find_cluster_wrong_address_of_the_environment_is_shown_with_its_variable(
    monkeypatch: pytest.MonkeyPatch, option: str | None, named: str, said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", named)
    with pytest.raises(ClusterError) as raised:
        connect.find_cluster(option)
    assert str(raised.value).startswith(f"variable RAY_ADDRESS: {said}")
