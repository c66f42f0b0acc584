"""`eagleray COMMAND`: the entry of the command line."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0, 1 for a failure, 2 for a mistake, 130 after Ctrl-C."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a model may write characters that the terminal's encoding lacks
        from eagleray.cli import commands  # here, because Ctrl-C may come while modules are imported

        return commands.run(sys.argv[1:] if arguments is None else list(arguments))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
