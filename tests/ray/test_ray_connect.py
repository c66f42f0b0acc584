"""Connecting to a cluster, from separate programs, and the errors when that fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import ray
import ray_cluster
from processes import children_of
from ray._common.usage import usage_lib
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from serving import is_running

from eagleray.cluster import placement_groups
from eagleray.cluster.connect import check_cluster, check_reachable, connect
from eagleray.cluster.context import current_ray_context
from eagleray.errors import ClusterError
from eagleray.messages.workers import RayContext

HERE = Path(__file__).parent
TOKEN = "a1b2c3d4" * 8


@pytest.fixture
def home() -> Iterator[Path]:
    """Yield a directory with a short path, because Unix sockets of a cluster are below it."""
    with tempfile.TemporaryDirectory(prefix="er-") as name:
        (Path(name) / "ray").mkdir()
        yield Path(name)


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Return the environment of a fresh login: without the tests' cluster, without a token."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**plain, "HOME": str(home), "RAY_TMPDIR": str(home), **ray_cluster.NO_IDLE_WORKERS, **variables}


def join(address: str, env: dict[str, str], *more: str) -> str:
    """Return the output of a program that joins `address`: the address of its cluster, or an error."""
    command = [sys.executable, str(HERE / "connect_program.py"), address, *more]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_connect_joins_an_address(cluster: str, home: Path) -> None:
    assert join(cluster, environment(home)) == cluster
    assert join("none", environment(home, RAY_ADDRESS=cluster)) == cluster


def test_connect_without_an_address_starts_a_cluster_that_stops_with_the_connection(home: Path) -> None:
    (home / "ray" / "ray_current_cluster").write_text("127.0.0.1:1")  # of one that crashed
    env = environment(home, SOME_TOKEN="secret", EXPECTED="secret")
    address = join("none", env, "run")
    assert address.rpartition(":")[2].isdigit()
    with pytest.raises(ClusterError):
        check_reachable(address)
    assert ray_cluster.wait_until(lambda: not processes_below(home), 10)


@pytest.mark.parametrize(
    ("victim", "name"),
    [
        pytest.param("raylet", "raylet", marks=pytest.mark.grid),  # test_ray_serve.py kills it too
        pytest.param("gcs_server", "control store", marks=pytest.mark.slow),
    ],
)
def test_connect_local_cluster_that_dies_ends_the_program_and_leaves_nothing(
    home: Path, victim: str, name: str
) -> None:
    command = [sys.executable, str(HERE / "connect_program.py"), "local", "run", "hold"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=environment(home), text=True, **pipes) as program:
        assert program.stdout is not None
        program.stdout.readline()
        daemons = descendants(program.pid)
        (pid,) = [pid for pid in daemons if Path(f"/proc/{pid}/comm").read_text().strip() == victim]
        os.kill(pid, signal.SIGKILL)
        said = program.stdout.read()
        assert program.wait(10) == 1
    assert f"lost: the Ray cluster that was started on this host is lost: its {name} is gone" in said
    assert not [pid for pid in daemons if is_running(pid)]
    assert not list(home.glob("eagleray-*"))


def descendants(pid: int) -> list[int]:
    return [found for child in children_of(pid) for found in (child, *descendants(child))]


def processes_below(path: Path) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"{path}/" in command:
            found.append(command)
    return found


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", "Ray cluster 127.0.0.1:1: cannot be reached (Connection refused)"),
        ("nosuchhost.invalid:6379", "Ray cluster nosuchhost.invalid:6379: cannot be reached"),
        ("nonsense", "Ray address 'nonsense' is not host:port, auto or local"),
        ("ray://127.0.0.1:10001", "Ray Client is not supported"),
    ],
)
def test_connect_address_without_a_cluster_is_refused(home: Path, address: str, said: str) -> None:
    answer = join(address, environment(home))
    assert answer.startswith("ClusterError: ")
    assert said in answer


def answering(handle: Callable[[socket.socket], None]) -> tuple[str, socket.socket]:
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                handle(server.accept()[0])
        except OSError:
            return

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{server.getsockname()[1]}", server


def test_check_reachable_server_that_is_no_ray_cluster_is_refused() -> None:
    def refuse(connection: socket.socket) -> None:
        with connection:
            connection.recv(100)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    address, server = answering(refuse)
    with server, pytest.raises(ClusterError, match="what listens there is not Ray's control store"):
        check_reachable(address)


def test_check_reachable_server_that_does_not_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagleray.cluster.connect.PREFLIGHT_SECONDS", 0.3)
    kept: list[socket.socket] = []
    address, server = answering(kept.append)
    with server, pytest.raises(ClusterError, match="no answer within"):
        check_reachable(address)
    for connection in kept:
        connection.close()


@pytest.mark.slow
def test_connect_cluster_that_demands_a_token(home: Path) -> None:
    program = subprocess.Popen(
        [sys.executable, str(HERE / "token_program.py")],
        env=environment(home, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with program:
        assert program.stdout is not None
        address = program.stdout.readline().strip()
        env = environment(home)
        assert "wants an authentication token, but this program shows none" in join(address, env)
        assert "does not accept the authentication token from RAY_AUTH_TOKEN" in join(
            address, {**env, "RAY_AUTH_TOKEN": "f" * 64}
        )
        token_file = home / ".ray" / "auth_token"
        token_file.parent.mkdir()
        token_file.write_text(TOKEN)
        assert join(address, env) == address  # found without RAY_AUTH_MODE
        assert "shows none" in join(address, {**env, "RAY_AUTH_MODE": "disabled"})


def test_connect_does_not_send_a_token_to_a_cluster_without_authentication(cluster: str, home: Path) -> None:
    """A plain Ray program with a token finds its actors dead there before they start."""
    token_file = home / ".ray" / "auth_token"
    token_file.parent.mkdir()
    token_file.write_text(TOKEN)
    assert join(cluster, environment(home), "run") == cluster


def test_check_cluster_other_versions_are_refused(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_cluster(cluster)
    monkeypatch.setattr(
        usage_lib, "get_cluster_metadata", lambda client: {"ray_version": "2.50.0", "python_version": "3.9.1"}
    )
    with pytest.raises(ClusterError, match=rf"Ray cluster {cluster}: .*Ray: 2\.50\.0 Python: 3\.9\.1"):
        check_cluster(cluster)


def test_connect_program_that_is_connected_keeps_its_connection(cluster: str) -> None:
    for address in (None, "auto", cluster):
        connection = connect(address, namespace="another")
        assert connection.address == cluster
        assert connection.node_id == ray_cluster.here()
        connection.close()
    with pytest.raises(ClusterError, match="but this process is connected to Ray at"):
        connect("127.0.0.1:1", namespace="another")


def test_current_ray_context_of_a_program_has_its_cluster(cluster: str) -> None:
    context = current_ray_context()
    assert context is not None
    assert context.address == cluster
    assert context.placement_group is None


def test_current_ray_context_of_an_actor_has_what_it_holds_and_was_assigned(
    cluster: str, make_group: ray_cluster.MakeGroup
) -> None:
    class Asker:
        def ask(self) -> bytes:
            return msgspec.msgpack.encode(current_ray_context())

    group_id = make_group({"CPU": 1}, {"CPU": 2, "GPU": 1})
    actor = (
        ray.remote(Asker)
        .options(
            num_cpus=1,
            num_gpus=1,
            scheduling_strategy=PlacementGroupSchedulingStrategy(placement_groups.handle(group_id), 1),
            runtime_env={"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1", "MINE": "1"}},
        )
        .remote()
    )
    try:
        context = msgspec.msgpack.decode(ray.get(actor.ask.remote(), timeout=30), type=RayContext)
    finally:
        ray.kill(actor)
    assert context.placement_group == group_id
    assert context.group_bundles == [{"CPU": 1}, {"CPU": 2, "GPU": 1}]
    assert context.caller is not None
    assert context.caller.held == {1: {"CPU": 1, "GPU": 1}}
    assert context.caller.name.startswith("Asker.ask (actor ")
    assert context.runtime_env["env_vars"]["MINE"] == "1"
    assert len(context.devices) == 1
    assert context.devices[0].isdigit()
