"""Pieces of Markdown for pages that are made from the code."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

SPAN = re.compile(r"(`+[^`]+`+)")


def code(text: str) -> str:
    return f"`{text}`"


def plain(text: str) -> str:
    """Return a sentence of the code, whose code spans stay and whose other characters mean themselves."""
    parts = SPAN.split(" ".join(text.split()))
    return "".join(part if SPAN.fullmatch(part) else re.sub(r"([*<>\[\]{}])", r"\\\1", part) for part in parts)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table whose cells are Markdown; empty without rows."""
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows]
    if not lines:
        return ""
    return f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n{''.join(lines)}\n"


def directive(name: str, argument: str, body: str) -> str:
    """Return a directive of MyST. Its fence is longer than those of its body."""
    longest = max((len(fence) for fence in re.findall(r"^`{3,}", body, re.M)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{{{name}}} {argument}\n{body.strip()}\n{fence}\n\n"
