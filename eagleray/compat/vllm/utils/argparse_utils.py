"""The parser of command lines that vLLM's examples use."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from eagleray.config.flag_spellings import plain_arguments

__all__ = ["FlexibleArgumentParser"]


class FlexibleArgumentParser(argparse.ArgumentParser):
    """A parser that takes vLLM's spellings of flags."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:  # type: ignore[override]
        """Parse as `argparse` does, with flags as they are declared."""
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args(list(plain_arguments(given)), namespace)
