"""`eagleray generate | chat | complete`, options from a file, and the modules that each process loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from serving import COMMAND, run_program, serve

import eagleray


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama"))


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    options = tmp_path_factory.mktemp("options") / "serve.yaml"
    options.write_text(f"model: {checkpoint}\nserved-model-name: from-file\nmax_model_len: 200\nlog-level: debug\n")
    with serve("--config", str(options), "--max-model-len", "300", is_fresh=True) as server:
        yield server


def eagle(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    if not stdin:
        return run_program(*arguments, timeout=60)
    return subprocess.run([*COMMAND, *arguments], input=stdin, capture_output=True, text=True, timeout=60)


def test_generate_command_completes_prompts_without_a_server(checkpoint):
    arguments = ("--max-tokens", "6", "--temperature", "0", "--log-level", "warning", "--num-threads", "1")
    two = eagle("generate", checkpoint, "-p", "Hello", "-p", "def main", *arguments)
    assert (two.returncode, two.stderr) == (0, "")
    from_input = eagle("generate", checkpoint, *arguments, stdin="Hello")
    assert from_input.stdout
    assert two.stdout.startswith(from_input.stdout)


def test_chat_and_complete_commands_print_the_servers_answers(server):
    url = ("--url", server.url, "--max-tokens", "6", "--temperature", "0")
    once = eagle("chat", *url, "-q", "Hello")
    assert (once.returncode, once.stderr) == (0, "")
    several = eagle("chat", *url, "--system-prompt", "Be brief.", stdin="Hello\n\nAnd you?\n")
    assert several.returncode == 0
    completed = eagle("complete", *url, "-q", "Hello")
    assert (completed.returncode, completed.stderr) == (0, "")
    assert eagle("complete", *url, stdin="Hello\n").stdout.removeprefix("> ").startswith(completed.stdout)


def test_chat_command_refused_or_without_a_server_prints_one_sentence(server):
    refused = eagle("complete", "--url", server.url, "--model-name", "other", "-q", "x")
    assert refused.returncode == 2
    assert "the server refused (404)" in refused.stderr
    absent = eagle("chat", "--url", "http://127.0.0.1:9/v1", "-q", "x")
    assert absent.returncode == 1
    assert "no server answers at http://127.0.0.1:9/v1" in absent.stderr
    assert len(refused.stderr.splitlines()) == len(absent.stderr.splitlines()) == 1


def test_options_of_flags_override_those_of_the_file(server):
    import httpx

    (model,) = httpx.get(server.url + "/models").json()["data"]
    assert model["id"] == "from-file"
    assert model["max_model_len"] == 300


@pytest.mark.parametrize(
    ("content", "message"), [("[1, 2]", "expected a mapping"), ("a: [", "not valid YAML"), ("prot: 1", "`port`")]
)
def test_options_of_a_wrong_file_are_refused_by_its_name(tmp_path, content, message):
    (tmp_path / "options.yaml").write_text(content)
    run = eagle("serve", "--config", str(tmp_path / "options.yaml"))
    assert run.returncode == 2
    assert message in run.stderr


def test_unknown_command_is_refused():
    run = eagle("sreve")
    assert run.returncode == 2
    assert run.stderr == "eagleray: error: there is no command 'sreve'; did you mean `eagleray serve`?\n"


def test_version_flag_prints_the_version():
    assert eagle("--version").stdout.strip() == eagleray.__version__


def test_collect_env_command_prints_json_without_secrets(monkeypatch):
    monkeypatch.setenv("EAGLERAY_API_KEY", "hidden-word")
    run = eagle("collect-env", "--json")
    facts = json.loads(run.stdout)
    assert facts["eagleray"]["version"] == eagleray.__version__
    assert {"Ray", "torch", "kernels", "memory", "packages"} <= facts.keys()
    assert "hidden-word" not in run.stdout + run.stderr


def test_api_server_and_supervisor_do_not_load_torch(server):
    def libraries(pid: int) -> str:
        return Path(f"/proc/{pid}/maps").read_text()

    assert "libtorch" in libraries(server.child("engine-0"))
    assert "libtorch" not in libraries(server.child("client-0"))
    assert "libtorch" not in libraries(server.process.pid)


def test_help_flag_loads_neither_torch_nor_sockets():
    code = (
        "import sys\nfrom eagleray.cli.main import main\n"
        "try:\n    main(['serve', '--help'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'torch', 'tokenizers', 'uvicorn', 'yaml'} & set(sys.modules)), file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.stderr.strip() == "[]"
    assert "--max-num-batched-tokens" in run.stdout
