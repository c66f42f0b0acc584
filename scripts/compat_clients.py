"""Clients that `scripts/compat.py` tries: their packages with versions, and what is expected to fail.

The script of a client is `tests/compat/clients/<name>.py`, or `.mjs` for a package of npm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TOOLS, STRUCTURED_OUTPUTS = "tool calls", "structured outputs"
"""Features that are missing, as the report names them."""


@dataclass(frozen=True)
class CompatClient:
    """A program of others, and the packages that its environment gets."""

    name: str
    """Name of its script and of its environment."""
    pins: tuple[str, ...]
    """Requirements for pip or npm, the client's own package first. Its version is the one of the report."""
    title: str
    """Name in the report."""
    bare_pins: tuple[str, ...] = ()
    """Requirements that are installed afterwards without those that they name themselves."""
    expected_failures: Mapping[str, str] = field(default_factory=dict)
    """Feature that is missing, by the name of the check that fails for it."""
    is_node: bool = False
    """Whether npm installs it, and node runs the script."""

    @property
    def version(self) -> str:
        """Version of the client's own package."""
        pin = (self.bare_pins or self.pins)[0]
        return pin.rpartition("@" if self.is_node else "==")[2]


CLIENTS = (
    CompatClient(
        "openai_python",
        ("openai==3.54.0",),
        "openai (Python)",
        expected_failures={
            "tools": TOOLS,
            "response_format json_object": STRUCTURED_OUTPUTS,
            "parse": STRUCTURED_OUTPUTS,
        },
    ),
)
