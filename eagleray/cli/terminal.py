"""Lines that a person types, and the answers to them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Generator, Iterator

from eagleray.errors import EagleRayError


class TypedLines:
    """Every line that is not empty, until the end of the input. Ctrl-C empties the line; a second one without a line
    between them raises `KeyboardInterrupt`."""

    def __init__(self, prompt: str) -> None:
        self._prompt = prompt
        self.was_interrupted = False
        """Whether Ctrl-C was the last input."""

    def __iter__(self) -> Iterator[str]:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives `input` a history and editing
        while True:
            try:
                line = input(self._prompt)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                if self.was_interrupted:
                    raise
                self.was_interrupted = True
                print("Ctrl-C again or Ctrl-D ends")
                continue
            self.was_interrupted = False
            if line.strip():
                yield line


def answer_lines(answer: Callable[[str], int | None], *, greeting: str) -> None:
    """Call `answer` for each line that is typed, until the end of the input.

    `answer` prints an answer and returns the number of its tokens, or None if the line asked for none. In a terminal
    `greeting` comes first, each answer is followed by its speed, and neither Ctrl-C during an answer nor a request that
    fails ends the program.
    """
    lines = TypedLines("> ")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        for line in lines:
            answer(line)
        return
    print(greeting)
    for line in lines:
        lines.was_interrupted = _answer_or_explain(answer, line)


def print_answer(parts: Generator[str, None, None]) -> None:
    """Print an answer as it comes. The generator is closed, also when Ctrl-C stops it."""
    try:
        with contextlib.closing(parts):
            for text in parts:
                print(text, end="", flush=True)
    except EagleRayError:
        print()  # the error begins a line
        raise
    print()


def _answer_or_explain(answer: Callable[[str], int | None], line: str) -> bool:
    """Print an answer and its speed, or the error of a request that fails. Returns whether Ctrl-C stopped it."""
    start = time.monotonic()
    try:
        num_tokens = answer(line)
        if num_tokens is not None:
            speed = num_tokens / (time.monotonic() - start)
            print(f"[{num_tokens} tokens, {speed:.1f} tokens/s]", file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]")
        return True
    except EagleRayError as error:
        print(f"eagleray: {error}", file=sys.stderr)
    return False
