"""Lines that a person types."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


def read_lines(prompt: str) -> Iterator[str]:
    """Yield every line that is not empty, until the end of the input. Ctrl-C empties the line."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives `input` a history and editing
    while True:
        try:
            line = input(prompt)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\nCtrl-D ends")
            continue
        if line.strip():
            yield line
