"""Checks of a client program: one JSON line for each, which `scripts/compat.py` reads.

Used by the scripts beside it, which run in environments of their own: no other package may be imported here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import Any

URL = os.environ["EAGLERAY_COMPAT_URL"]
"""Address of the server, without `/v1`."""
MODEL = os.environ["EAGLERAY_COMPAT_MODEL"]
"""Name of the served model."""
ADMIN_KEY = os.environ["EAGLERAY_COMPAT_ADMIN_KEY"]
"""Key for the control routes; all other routes need none."""
MODEL_DIRECTORY = os.environ["EAGLERAY_COMPAT_MODEL_DIRECTORY"]
"""Directory of its checkpoint and tokenizer."""
COMMAND_SECONDS = 300.0
MAX_DETAIL = 300

_checks: list[tuple[str, Callable[[], object]]] = []


def check(name: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Register the decorated function as a check; it fails by an exception."""

    def register(function: Callable[[], object]) -> Callable[[], object]:
        _checks.append((name, function))
        return function

    return register


def run_checks() -> None:
    """Run every check in the order of registration and print a line for each."""
    for name, function in _checks:
        try:
            function()
        except Exception as error:
            traceback.print_exc()
            report(name, is_ok=False, detail=f"{type(error).__name__}: {error}")
        else:
            report(name, is_ok=True)


def report(name: str, *, is_ok: bool, detail: str = "") -> None:
    """Print the line of one check."""
    print(json.dumps({"name": name, "ok": is_ok, "detail": " ".join(detail.split())[:MAX_DETAIL]}), flush=True)


def run_command(*command: str) -> str:
    """Run a program and return its output. Raises `RuntimeError` with the end of the output on failure."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMMAND_SECONDS, check=False
    )
    print(done.stdout, file=sys.stderr)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-MAX_DETAIL:]}")
    return done.stdout


def run_module(module: str, *arguments: str) -> str:
    """Run a module of this environment as a program and return its output. Raises as `run_command`."""
    return run_command(sys.executable, "-m", module, *arguments)


def expect(is_so: object, message: str, *values: object) -> None:
    """Raise `AssertionError` with the message and the values if a condition does not hold."""
    if not is_so:
        raise AssertionError(" ".join([message, *map(repr, values)]))


def expect_raises(kind: type[BaseException], call: Callable[[], object]) -> BaseException:
    """Return the exception of a kind that a call raises. Raises `AssertionError` if it raises none or another."""
    try:
        call()
    except kind as error:
        return error
    except Exception as error:
        raise AssertionError(f"{kind.__name__} was expected, not {type(error).__name__}: {error}") from error
    raise AssertionError(f"{kind.__name__} was expected, not an answer")


def expect_texts(texts: Sequence[object]) -> None:
    """Raise `AssertionError` if one of the values is not a text with characters."""
    for text in texts:
        expect(isinstance(text, str) and text, "a text was expected, not", text)


def expect_chat_answer(answer: Any, max_tokens: int) -> None:
    """Raise `AssertionError` if a chat's answer has no text, or more than `max_tokens` tokens."""
    expect_texts([answer.choices[0].message.content])
    expect(answer.usage.completion_tokens <= max_tokens, "too many tokens", answer.usage)


def join_chat_events(events: Iterable[Any]) -> str:
    """Return the text of the events of a streamed chat with one choice."""
    return "".join(event.choices[0].delta.content or "" for event in events if event.choices)
