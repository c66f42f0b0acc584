"""The order of runs that are compared with each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from eagleray.errors import UserError

Variant = TypeVar("Variant")


@dataclass(frozen=True, kw_only=True)
class AlternatingRuns:
    """`count` rounds that each run every variant once. Raises `UserError` for a count below 1."""

    count: int = 3

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f"--rounds must be at least 1, but it is {self.count}")

    def order(self, variants: Sequence[Variant]) -> Iterator[Variant]:
        """Yield the variants of all rounds, every second round reversed: later runs find a warmer machine."""
        for number in range(self.count):
            yield from variants if number % 2 == 0 else variants[::-1]
