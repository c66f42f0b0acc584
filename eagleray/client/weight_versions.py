"""The versions of the weights that made the tokens of a completion. Pure; owned by its `Completion`."""

from __future__ import annotations

from eagleray.client.outputs import WeightVersionSpan

FIRST_VERSION = "default"
"""Version of the first tokens from an engine whose chunk names none."""


class WeightVersions:
    """Versions of a completion's tokens. Costs nothing while all of them have the first version."""

    __slots__ = ("_starts",)

    def __init__(self) -> None:
        self._starts: list[tuple[int, str]] = [(0, FIRST_VERSION)]

    def begin(self, version: str, index: int) -> None:
        """Give this version to the tokens from `index` on."""
        if self._starts[-1][0] == index:
            self._starts.pop()
        if not self._starts or self._starts[-1][1] != version:
            self._starts.append((index, version))

    def spans(self, num_tokens: int) -> list[WeightVersionSpan]:
        """Return the spans that cover `num_tokens` tokens, in order. Neighbours have different versions."""
        ends = [start for start, _ in self._starts[1:]] + [num_tokens]
        return [
            WeightVersionSpan(version=version, start=start, end=min(end, num_tokens))
            for (start, version), end in zip(self._starts, ends, strict=True)
            if start < num_tokens
        ]
