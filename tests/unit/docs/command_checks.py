"""Checks of documented commands that execute nothing: the parser, the routes and the bodies are the real ones."""

from __future__ import annotations

import itertools
import re
import shlex
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import msgspec
from documented_commands import Command
from named_things import make_targets

from eagleray.cli.commands import COMMANDS, make_parser
from eagleray.config.build import build_config, field_owners
from eagleray.config.flags import given_options
from eagleray.config.sections import Config
from eagleray.config.vllm_options import translate
from eagleray.errors import EagleRayError
from eagleray.server.app import list_endpoints
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.service import Service

ROOT = Path(__file__).parents[3]
SERVERS = ("localhost:8000", "127.0.0.1:8000")
"""Addresses under which documents show a server of eagleray."""
SECTIONS = tuple(field.name for field in msgspec.structs.fields(Config))
MODULES = ("eagleray.compat.vllm", "json.tool")
"""Modules that documents run by `python -m`."""
IMAGES = ("eagleray", "eagleray-cuda")
"""Names that documents give to images of deploy/Dockerfile."""
ELLIPSIS = "…"
OTHERS = {
    *("cd", "echo", "export", "kill", "source", "wait"),  # the shell's
    *("bash", "cat", "git", "grep", "hf", "ls", "node", "pgrep", "ray", "rm", "serve", "sudo", "timeout"),
}
"""Programs whose arguments are not checked."""


class CommandWrong(AssertionError):
    """A documented command that would fail."""


class Route(NamedTuple):
    pattern: re.Pattern[str]
    endpoint: Endpoint


class Checker:
    """Checks commands against the command line, the routes and the files of the repository."""

    def __init__(self, service: Service, config: Config) -> None:
        self._service = service
        self._routes = [
            Route(re.compile(re.sub(r"\{\w+\}", "[^/]+", endpoint.path)), endpoint)
            for endpoint in list_endpoints(service, config)
        ]
        self._parser = make_parser(COMMANDS)
        self._programs: dict[str, Callable[[Sequence[str]], None]] = {
            "eagleray": self._check_eagleray,
            "curl": self._check_curl,
            "docker": self._check_docker,
            "kubectl": self._check_files,
            "make": self._check_make,
            "python": self._check_python,
            "pip": self._check_pip,
        }
        self._targets = make_targets(ROOT)
        self._extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    def check(self, command: Command) -> None:
        """Raise `CommandWrong` for a command that would fail."""
        words = [word for word in command.words[1:] if word != ELLIPSIS]
        if (check := self._programs.get(command.program)) is not None:
            check(words)
        elif command.program not in OTHERS:
            raise CommandWrong(
                f"{command.program} is no program that documents use (tests/unit/docs/command_checks.py)"
            )

    def _check_eagleray(self, words: Sequence[str]) -> None:
        if words[:1] in (["--version"], ["--help"]):
            return
        try:
            arguments = self._parser.parse(words)
            options = translate(given_options(arguments, sections=SECTIONS), field_owners(), as_flags=True).options
            build_config(**options)
        except ValueError as error:
            raise CommandWrong(f"eagleray {shlex.join(words)}: {error}") from None

    def _check_make(self, words: Sequence[str]) -> None:
        variables = dict(word.split("=", 1) for word in words if "=" in word)
        for target in words:
            if "=" not in target and target not in self._targets:
                raise CommandWrong(f"there is no make target {target}")
        if "serve" in words:
            model = [variables["MODEL"]] if "MODEL" in variables else []
            self._check_eagleray(["serve", *model, *shlex.split(variables.get("ARGS", ""))])

    def _check_python(self, words: Sequence[str]) -> None:
        match list(words):
            case ["-m", "pip", *rest]:
                self._check_pip(rest)
            case ["-m", module, *_] if module in MODULES or module == "venv":
                pass
            case ["-c", program, *_]:
                compile(program, "document", "exec")
            case [script, *_] if (ROOT / script).is_file():
                pass
            case _:
                raise CommandWrong(f"python {shlex.join(words)}: there is no such script")

    def _check_docker(self, words: Sequence[str]) -> None:
        self._check_files(words)
        image = next((index for index, word in enumerate(words) if word in IMAGES), None)
        if words[0] == "run" and image is not None and words[image + 1 :]:
            self._check_eagleray(words[image + 1 :])

    def _check_files(self, words: Sequence[str]) -> None:
        for flag, path in itertools.pairwise(words):
            if flag == "-f" and not (ROOT / path).is_file():
                raise CommandWrong(f"there is no file {path}")

    def _check_pip(self, words: Sequence[str]) -> None:
        for extras in re.findall(r"\beagleray\[([\w,]+)\]", " ".join(words)):
            for extra in extras.split(","):
                if extra not in self._extras:
                    raise CommandWrong(f"there is no extra {extra}")

    def _check_curl(self, words: Sequence[str]) -> None:
        request = _read_curl(words)
        url = urlsplit(request.url if "://" in request.url else f"http://{request.url}")
        if url.netloc not in SERVERS:
            return
        endpoint = next((route.endpoint for route in self._routes if route.pattern.fullmatch(url.path)), None)
        if endpoint is None or request.method not in endpoint.operations:
            raise CommandWrong(f"there is no route {request.method} {url.path}")
        self._check_body(endpoint.operations[request.method], request.body, parse_qs(url.query))

    def _check_body(self, operation: Operation, body: str | None, query: dict[str, Any]) -> None:
        kind = operation.request_body
        if unknown := query.keys() - {*(kind.__struct_encode_fields__ if kind else ())}:
            raise CommandWrong(f"the route has no parameters {unknown}")
        if body is None:
            return
        if kind is None:
            raise CommandWrong("the route has no body")
        state: dict[str, Any] = {}
        try:
            self._service.body_decoder(kind, operation.fates).decode(body.encode(), state)
        except (ValueError, EagleRayError) as error:
            raise CommandWrong(f"{body}: {error}") from None
        if state:
            raise CommandWrong(f"{body}: fields without an effect: {state}")


class Request(NamedTuple):
    method: str
    url: str
    body: str | None
    """The body's text; None without one, and for a file."""


CURL_VALUES = {"-H", "--header", "-o", "--output", "-w", "-m", "--max-time", "--unix-socket", "--cacert", "-u"}
"""Options of curl with a value."""
CURL_SWITCHES = {"-s", "-S", "-sS", "-N", "-sN", "-f", "-i", "-k", "--no-buffer", "--fail", "--silent"}


def _read_curl(words: Sequence[str]) -> Request:
    """Return the request of a curl command. Raises `CommandWrong` for an option that is not known here."""
    method, body, urls = None, None, []
    rest = iter(words)
    for word in rest:
        if word in ("-X", "--request"):
            method = next(rest)
        elif word in ("-d", "--data", "--json"):
            body = next(rest)
        elif word in CURL_VALUES:
            next(rest)
        elif word.startswith("-") and word not in CURL_SWITCHES:
            raise CommandWrong(f"curl {word}: not known to command_checks.py")
        elif not word.startswith("-"):
            urls.append(word)
    if len(urls) != 1:
        raise CommandWrong(f"curl {shlex.join(words)}: expected one URL")
    method = method or ("GET" if body is None else "POST")
    return Request(method, urls[0], None if body is None or body.startswith("@") else body)
