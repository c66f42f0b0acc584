"""Try third-party client programs against a server, each from its own package in an environment of its own.

    python scripts/compat.py                          every client; writes the table of docs/compatibility.md
    python scripts/compat.py --only openai_python     one client; only its row is written
    python scripts/compat.py --list                   the clients and their packages

Environments lie in EAGLERAY_COMPAT_DIR (~/.cache/eagleray/compat) and are made again if the pins of a client change.
The exit code is 1 if a check fails, or if a client could not be installed or run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import httpx
from chaos_server import ChaosFailed, Server, exit_on_sigterm
from compat_clients import CLIENTS, CompatClient

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests/compat/clients"
DOCUMENT = ROOT / "docs/compatibility.md"
BEGIN, END = "<!-- make compat: begin -->\n", "<!-- make compat: end -->\n"
HEAD = ("| client | version | checks passed | what fails |", "|---|---|---|---|")

SERVER_OPTIONS = ("--enable-sglang-api", "--enable-tokenizer-info-endpoint")
"""Options that enable routes which some clients use."""
POOLING_OPTIONS = ("--runner", "pooling", "--hf-overrides", '{"is_matryoshka": true}')
"""Options that serve the embedded model as an embedding model."""
ADMIN_KEY = "compat-admin"
"""Key for the control routes."""
INSTALL_SECONDS = 1800.0
CHECK_SECONDS = 900.0
MAX_REASON = 200


@dataclass(frozen=True)
class CheckResult:
    """One line that the script of a client printed."""

    name: str
    is_ok: bool
    detail: str


@dataclass(frozen=True)
class ClientResult:
    """All that one client reported."""

    client: CompatClient
    checks: tuple[CheckResult, ...] = ()
    failure: str = ""
    """Reason for which the client could not be installed or did not run to its end."""

    @property
    def passed(self) -> int:
        return sum(check.is_ok for check in self.checks)

    def failures(self) -> list[str]:
        """Return everything that failed, as texts."""
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.is_ok]
        return [*([self.failure] if self.failure else []), *failed]

    def row(self) -> str:
        """Return the row of the report."""
        failed = [check.name for check in self.checks if not check.is_ok]
        text = "; ".join([*([self.failure] if self.failure else []), *failed]) or "–"
        passed = f"{self.passed} of {len(self.checks)}"
        return f"| {self.client.title} | {self.client.version} | {passed} | {_cell(text)} |"


class ClientRunner(Protocol):
    """Installs a client and runs its script. A test puts another in its place."""

    def install(self, client: CompatClient) -> None:
        """Make the environment of a client. Raises `CompatFailed`."""

    def run(self, client: CompatClient) -> str:
        """Run the script of a client and return its standard output. Raises `CompatFailed`, with the output so far."""


class CompatFailed(Exception):
    """A client that could not be installed, or did not run to its end."""

    def __init__(self, reason: str, output: str = "") -> None:
        super().__init__(reason)
        self.output = output
        """Standard output until then."""


def try_client(client: CompatClient, runner: ClientRunner) -> ClientResult:
    """Install a client, run its script and return its report, whatever happens."""
    try:
        runner.install(client)
    except CompatFailed as error:
        return ClientResult(client, failure=f"not installed: {error}")
    try:
        checks = tuple(read_checks(runner.run(client)))
    except CompatFailed as error:
        return ClientResult(client, tuple(read_checks(error.output)), f"did not run to its end: {error}")
    return ClientResult(client, checks, "" if checks else "did not report a check")


def read_checks(output: str) -> Iterator[CheckResult]:
    """Yield the checks among the lines of a script; other lines are the client's own output."""
    for line in output.splitlines():
        if line.startswith('{"name":'):
            fields = json.loads(line)
            yield CheckResult(fields["name"], fields["ok"], fields["detail"])


def update_table(document: str, results: Iterable[ClientResult], clients: Sequence[CompatClient] = CLIENTS) -> str:
    """Return the document with the rows of these clients; rows of other clients in the table of clients stay."""
    before, _, rest = document.partition(BEGIN)
    old, _, after = rest.partition(END)
    if not rest or END not in rest:
        raise ValueError(f"the document has no table between {BEGIN.strip()} and {END.strip()}")
    rows = {row.split("|")[1].strip(): row for row in old.splitlines()[len(HEAD) :]}
    rows |= {result.client.title: result.row() for result in results}
    lines = [*HEAD, *(rows[client.title] for client in clients if client.title in rows)]
    return before + BEGIN + "".join(f"{line}\n" for line in lines) + END + after


def _cell(text: str) -> str:
    text = " ".join(text.replace("|", "/").replace("`", "'").split())
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}…"


class LocalRunner:
    """Runs clients on this machine, in environments below a directory, against one server."""

    def __init__(self, directory: Path, log: Path, *, url: str, model: str) -> None:
        self._directory = directory
        self._log = log
        self._variables = {
            "EAGLERAY_COMPAT_URL": url,
            "EAGLERAY_COMPAT_MODEL": model,
            "EAGLERAY_COMPAT_ADMIN_KEY": ADMIN_KEY,
            "EAGLERAY_COMPAT_MODEL_DIRECTORY": str(ROOT / "eagleray/demo_model"),
            # no client may look for a model or a data set elsewhere
            "HF_HUB_OFFLINE": "1",
            "DO_NOT_TRACK": "1",
        }

    def install(self, client: CompatClient) -> None:
        place, mark = self._place(client), self._place(client) / ".ready"
        pins = json.dumps([*client.pins, "bare", *client.bare_pins])
        if mark.exists() and mark.read_text() == pins:
            return
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        if client.is_node:
            self._execute(["npm", "install", "--no-audit", "--no-fund", *client.pins], place, INSTALL_SECONDS)
        else:
            venv.create(place, with_pip=True)
            pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet"]
            self._execute([*pip, *client.pins], place, INSTALL_SECONDS)
            if client.bare_pins:
                self._execute([*pip, "--no-deps", *client.bare_pins], place, INSTALL_SECONDS)
        mark.write_text(pins)

    def run(self, client: CompatClient) -> str:
        place = self._place(client)
        with tempfile.TemporaryDirectory(prefix="eagleray-compat-") as directory:
            if not client.is_node:
                command = [str(place / "bin/python"), str(SCRIPTS / f"{client.name}.py")]
                return self._execute(command, Path(directory), CHECK_SECONDS)
            # node looks for packages beside the script
            script = shutil.copy(SCRIPTS / f"{client.name}.mjs", place)
            node = place / "node_modules/.bin/node"
            return self._execute([str(node), script], Path(directory), CHECK_SECONDS)

    def _place(self, client: CompatClient) -> Path:
        pins = hashlib.sha256(repr((client.pins, client.bare_pins, sys.version_info[:2])).encode()).hexdigest()
        return self._directory / f"{client.package}-{pins[:12]}"

    def _execute(self, command: Sequence[str], directory: Path, seconds: float) -> str:
        """Run a program and return its standard output; errors go to the log. Raises `CompatFailed`."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | self._variables
        with self._log.open("ab") as log, tempfile.TemporaryFile("w+") as output:
            begin = log.tell()
            try:
                process = subprocess.Popen(
                    command,
                    cwd=directory,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=log,
                    start_new_session=True,
                )
            except OSError as error:
                raise CompatFailed(f"{command[0]}: {error.strerror}") from None
            reason = _wait(process, seconds)
            output.seek(0)
            text = output.read()
        if reason:
            errors = self._log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
            raise CompatFailed(": ".join([reason, *errors[-1:]]), text)
        return text


def _wait(process: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for a program to exit, and kill the rest of its process group. Return the reason if it failed, else ""."""
    try:
        code = process.wait(seconds)
        return f"exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        return f"still running after {seconds:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def serving(*options: str) -> Iterator[tuple[str, str]]:
    """Serve the embedded model with options; yield the address and the model's name.

    Raises `ChaosFailed` if the server does not start, or fails meanwhile.
    """
    with tempfile.TemporaryDirectory(prefix="eagleray-compat-") as root:
        keys = {"EAGLERAY_ADMIN_API_KEY": ADMIN_KEY}
        server = Server([*SERVER_OPTIONS, *options], Path(root), log=Path(root) / "serve.log", env=keys)
        try:
            server.wait_until_serving()
            models = httpx.get(f"{server.url}/v1/models", timeout=30.0, trust_env=False).json()
            yield server.url, models["data"][0]["id"]
            server.check()
            server.stop()
        finally:
            server.kill()


def try_clients(
    clients: Sequence[CompatClient], runner: ClientRunner, say: Callable[[str], None]
) -> list[ClientResult]:
    """Try one client after the other and say how each went."""
    results = []
    for client in clients:
        say(f"{client.name}: {' '.join([*client.pins[:1], *client.bare_pins[:1]])} …")
        result = try_client(client, runner)
        say(f"{client.name}: {result.passed} of {len(result.checks)} checks passed")
        for failure in result.failures():
            say(f"{client.name}: FAILED {failure}")
        results.append(result)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", action="append", choices=names, metavar="NAME", help="try this client; repeatable")
    parser.add_argument("--list", action="store_true", help="print the clients and their packages")
    options = parser.parse_args()
    if options.list:
        for client in CLIENTS:
            print(f"{client.name:20} {' '.join([*client.pins, *client.bare_pins])}")
        return 0
    exit_on_sigterm()
    directory = Path(os.environ.get("EAGLERAY_COMPAT_DIR") or Path.home() / ".cache/eagleray/compat").expanduser()
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "compat.log"
    log.write_text("")
    print(f"other output of the clients: {log}", flush=True)
    chosen = [client for client in CLIENTS if options.only is None or client.name in options.only]
    results: list[ClientResult] = []
    try:
        for is_pooling in sorted({client.is_pooling for client in chosen}):
            with serving(*(POOLING_OPTIONS if is_pooling else ())) as (url, model):
                runner = LocalRunner(directory, log, url=url, model=model)
                served = [client for client in chosen if client.is_pooling == is_pooling]
                results += try_clients(served, runner, lambda line: print(line, flush=True))
    except ChaosFailed as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        DOCUMENT.write_text(update_table(DOCUMENT.read_text("utf-8"), results), "utf-8")
    return int(any(result.failures() for result in results))


if __name__ == "__main__":
    sys.exit(main())
