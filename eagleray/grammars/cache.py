"""Compiled grammars by content, the last used ones. Used from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from eagleray.messages.grammars import (
    MAX_PREPARED_BYTES,
    MAX_PREPARED_COMPILED_BYTES,
    MAX_PREPARED_GRAMMARS,
    Grammar,
)

Outcome = TypeVar("Outcome")

MAX_GRAMMARS = 2 * MAX_PREPARED_GRAMMARS
MAX_SOURCE_BYTES = 2 * MAX_PREPARED_BYTES
"""Bound of the sources of all grammars together, since a grammar that llguidance has compiled may take 200 bytes for
each of its source."""
MAX_COMPILED_BYTES = 2 * MAX_PREPARED_COMPILED_BYTES
"""Bound of the compiled grammars together, of those whose library reports their size. All bounds are twice the
scheduler's, so that the cache has every grammar that the scheduler counts as compiled."""


class GrammarCache(Generic[Outcome]):
    """Has compiled grammars, or reasons why grammars cannot be compiled. Each has a cache of its own, so that refused
    grammars do not displace grammars that the scheduler counts as compiled."""

    def __init__(self) -> None:
        self._outcomes: OrderedDict[Grammar, Outcome] = OrderedDict()
        self._compiled_bytes: dict[Grammar, int] = {}
        self._num_bytes = 0
        """Size of the sources."""
        self._num_compiled_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._outcomes)

    def find(self, grammar: Grammar) -> Outcome | None:
        """Return the outcome of compiling a grammar, or None if the cache does not have it."""
        with self._lock:
            if grammar in self._outcomes:
                self._outcomes.move_to_end(grammar)
            return self._outcomes.get(grammar)

    def put(self, grammar: Grammar, outcome: Outcome, *, num_bytes: int = 0) -> None:
        """Add a grammar, in place of the ones that were used longest ago. `num_bytes`: see `CompiledGrammar`."""
        with self._lock:
            if grammar not in self._outcomes:
                self._num_bytes += len(grammar.source)
            self._num_compiled_bytes += num_bytes - self._compiled_bytes.get(grammar, 0)
            self._compiled_bytes[grammar] = num_bytes
            self._outcomes[grammar] = outcome
            while len(self._outcomes) > 1 and (
                len(self._outcomes) > MAX_GRAMMARS
                or self._num_bytes > MAX_SOURCE_BYTES
                or self._num_compiled_bytes > MAX_COMPILED_BYTES
            ):
                dropped, _ = self._outcomes.popitem(last=False)
                self._num_bytes -= len(dropped.source)
                self._num_compiled_bytes -= self._compiled_bytes.pop(dropped)
