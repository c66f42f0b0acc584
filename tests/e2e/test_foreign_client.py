"""The client wire: the program does what docs/wire.md says, and a client that shares no code with it works."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zmq
from checkpoints import make_checkpoint
from fleets import SECONDS, connect, incarnations, label, tokens, wait_until_running, wait_until_whole
from serving import is_running, serve

from eagleray.identity import ClientId, EngineId
from eagleray.messages import control, lifecycle, membership, outputs, requests, sampling, scaling
from eagleray.messages.codec import Codec
from eagleray.messages.failure import Ended, Failure
from eagleray.messages.lifecycle import Alive, ClientStarted, Register
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "wire.md").read_text()
CLIENT = ROOT / "examples" / "foreign_client" / "client.mjs"
NODE = shutil.which("node")

needs_node = pytest.mark.skipif(NODE is None, reason="node is not here: the foreign client is a Node.js program")

NOT_FOR_ALL = {
    *("CallWorkers", "WorkersReturned", "Command", "CommandDone", "ControlCall", "ControlReturned"),
    *("FetchCheckpoint", "CheckpointFetched"),
}
"""Messages of worker extensions and of control calls, which are for Python clients."""

NOT_OF_CLIENTS = {"EngineStarted", "EngineLoaded", "ExpertsOpened", "ExpertsJoined", "ExpertsBroken", "Ended"}

EVERYTHING = CLIENT_INBOX | CLIENT_OUTBOX
MODULES = (control, lifecycle, membership, outputs, requests, sampling, scaling)


# What is written.


def documented() -> dict[str, dict[str, str]]:
    """Return the tables: by struct name, its fields and the texts of their defaults."""
    tables: dict[str, dict[str, str]] = {}
    for section in re.split(r"^#+ ", TEXT, flags=re.MULTILINE):
        if name := re.match(r"`(\w+)`\n", section):
            rows = re.findall(r"^\| `(\w+)` \|.*\| *([^|]*?) *\|$", section, flags=re.MULTILINE)
            tables[name[1]] = {field: default.strip("`") for field, default in rows}
    return tables


def struct(name: str) -> Any:
    if name in ("EngineId", "ClientId"):
        return {"EngineId": EngineId, "ClientId": ClientId}[name]
    return next(getattr(module, name) for module in MODULES if hasattr(module, name))


def default(field: msgspec.structs.FieldInfo) -> Any:
    value = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, msgspec.Struct):
        return msgspec.to_builtins(value)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", documented())
def test_wire_table_fields_and_defaults_equal_the_struct(name):
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct(name))}
    table = documented()[name]
    assert list(table) == list(fields)
    for field, text in table.items():
        assert fields[field].required == (text == ""), field
        if text:
            assert literal(text) == default(fields[field]), field


def literal(text: str) -> Any:
    names = {"nil": None, 'b""': b""}
    return names[text] if text in names else json.loads(text)


def test_wire_every_message_has_a_table():
    messages = {kind.__name__ for kind in get_args(EVERYTHING)} - NOT_FOR_ALL - NOT_OF_CLIENTS
    assert messages <= documented().keys()


def examples() -> list[str]:
    return re.findall(r"```json\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.parametrize("text", examples(), ids=lambda text: json.loads(text)["type"])
def test_wire_example_equals_encoded_message(text):
    message = msgspec.json.decode(text, type=EVERYTHING)
    assert json.loads(msgspec.json.encode(message)) == json.loads(text)


def test_wire_example_bytes_equal_encoded_bytes():
    pairs = re.findall(r"```json\n([^`]*)```\n\n```hex\n([^`]*)```", TEXT)
    assert len(pairs) == 2
    for text, hexadecimal in pairs:
        message, wire = msgspec.json.decode(text, type=EVERYTHING), bytes.fromhex(hexadecimal)
        assert Codec[Any](EVERYTHING).encode(message) == [wire]
        assert Codec[Any](EVERYTHING).decode([wire]) == message


# What is done.


@pytest.fixture(scope="module")
def attach_file(tmp_path_factory):
    return tmp_path_factory.mktemp("attach") / "attach.json"


@pytest.fixture(scope="module")
def server(tmp_path_factory, attach_file):
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3", max_position_embeddings=10_000)
    options = ("--data-parallel-size", "2", "--attach-file", str(attach_file), "--log-level", "debug")
    with serve(str(checkpoint), *options, "--max-model-len", "10000") as server:
        yield server
    assert not attach_file.exists()


@pytest.fixture
def http(server):
    with connect(server) as http:
        wait_until_whole(http, 2)
        yield http


@contextlib.contextmanager
def foreign(attach_file: Path, prompt: list[int], *options: str):
    """Run the client with a prompt and options."""
    assert NODE is not None
    with tempfile.TemporaryDirectory(prefix="er-") as directory:
        words = [NODE, str(CLIENT), str(attach_file), *options, *map(str, prompt)]
        process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": directory}
        )
        try:
            yield process
        finally:
            process.kill()
            process.communicate()


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    said, complaint = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, complaint
    return json.loads(said)


def test_attach_file_mode_is_private(server, attach_file):
    assert stat.S_IMODE(attach_file.stat().st_mode) == 0o600
    said = json.loads(attach_file.read_text())
    assert said["supervisor"].startswith("ipc://")
    assert said["instance"]


@needs_node
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0.8, "seed": 2**60 + 1}])
def test_foreign_client_tokens_equal_http(attach_file, http, params):
    prompt = [5, 6, 7, 300]
    options = [word for name, value in params.items() for word in (f"--{name}", str(value))]
    with foreign(attach_file, prompt, "--max-tokens", "30", *options) as process:
        said = answer(process)
    assert said["token_ids"] == tokens(http, prompt, max_tokens=30, **params)
    assert said["finish_reason"] == "length"
    assert len(said["engines"]) == 1


@needs_node
def test_foreign_client_long_prompt_tokens_equal_http(attach_file, http):
    prompt = [3 + i % 300 for i in range(2000)]
    with foreign(attach_file, prompt, "--max-tokens", "3") as process:
        assert answer(process)["token_ids"] == tokens(http, prompt, max_tokens=3, temperature=0)


@needs_node
def test_foreign_client_killed_engine_request_resumes(server, attach_file, http):
    prompt, count = [9, 8, 7], 3000
    expected = tokens(http, prompt, max_tokens=count, temperature=0)
    wait_until_whole(http, 2)
    with foreign(attach_file, prompt, "--max-tokens", str(count)) as process:
        rank, incarnation = wait_until_running(http)
        os.kill(server.child(label(rank, incarnation)), signal.SIGKILL)
        said = answer(process)
    assert said["token_ids"] == expected
    assert [engine["rank"] for engine in said["engines"]] == [rank, 1 - rank]
    assert wait_until_whole(http, 2)[rank] == incarnation + 1


@needs_node
def test_foreign_client_vanished_is_evicted(attach_file, http):
    with foreign(attach_file, [4, 4, 4], "--max-tokens", "9000", "--lease", "1.5") as process:
        wait_until_running(http)
        process.kill()
    wait_until_whole(http, 2)  # and idle


def junk() -> list[list[bytes]]:
    encode = msgspec.msgpack.encode
    return [
        [b""],
        [b"junk"],
        [b"\xc1"],
        [b"many", b"frames"],
        [encode({"type": "Explode"})],
        [encode({"type": "Register"})],
        [encode({"type": "Register", "address": 7, "lease": "long"})],
        [encode(Register("carrier-pigeon://roof", 1.0))],
        [encode(Register("tcp://nowhere", 1.0))],
        [encode(Register("", 1.0))],
        [encode(Register("ipc:///nowhere/at/all", 1.0))],
        [encode(Register("ipc://" + "x" * 500, 1.0))],
        [encode(Register("ipc:///tmp/er-nobody", -1.0))],
        [encode(Register("ipc:///tmp/er-nobody", float("nan")))],
        [encode(Register("ipc:///tmp/er-nobody", float("inf")))],
        [encode(Alive(ClientId("somebody", 3)))],
        [encode(Alive(EngineId("somebody", 0)))],
        [encode(ClientStarted(ClientId("somebody", 3)))],
        [encode(Ended(EngineId("somebody", 0), Failure(kind="X", message="boo")))],
    ]


def say(address: str, messages: list[list[bytes]]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 1000
        socket.connect(address)
        for frames in messages:
            socket.send_multipart(frames)


def test_foreign_client_malformed_messages_disturb_no_request(server, attach_file, http):
    before = sorted(server.children)
    there = incarnations(http)
    expected = tokens(http, [1, 2, 3], max_tokens=10, temperature=0)
    supervisor = json.loads(attach_file.read_text())["supervisor"]
    say(supervisor, junk())
    runtime_dir = Path(supervisor.removeprefix("ipc://")).parent
    others = [path for path in runtime_dir.iterdir() if path.is_socket() and path.name != "supervisor"]
    inboxes = [path for path in others if path.name.startswith(("engine-", "client-"))]
    assert len(inboxes) >= 3
    for path in inboxes:
        say(f"ipc://{path}", [[b"junk"], [b"many", b"frames"], [msgspec.msgpack.encode({"type": "Explode"})]])
    # What it has said was read when something said later has been answered.
    assert knock(supervisor).member.index
    for rank in there:
        headers = {"X-data-parallel-rank": str(rank)}
        assert tokens(http, [1, 2, 3], headers, max_tokens=10, temperature=0) == expected
    assert sorted(server.children) == before
    assert all(map(is_running, before))
    assert incarnations(http) == there


def knock(supervisor: str) -> lifecycle.Attach:
    """Register, and receive `Attach`."""
    with (
        tempfile.TemporaryDirectory(prefix="er-") as directory,
        zmq.Context() as context,
        context.socket(zmq.PULL) as inbox,
    ):
        inbox.bind(f"ipc://{directory}/inbox")
        say(supervisor, [[msgspec.msgpack.encode(Register(f"ipc://{directory}/inbox", 1.5))]])
        assert inbox.poll(SECONDS * 1000), "no Attach"
        message = Codec[Any](CLIENT_INBOX).decode(inbox.recv_multipart())
    assert isinstance(message, lifecycle.Attach)
    assert message.supervisor == supervisor
    assert {joined.member.rank for joined in message.members if isinstance(joined.member, EngineId)} == {0, 1}
    return message
