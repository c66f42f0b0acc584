"""Lines that a person types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


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
