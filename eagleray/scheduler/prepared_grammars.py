"""Grammars that the workers have compiled. Owned by the scheduler."""

from __future__ import annotations

from collections import OrderedDict

from eagleray.messages.grammars import (
    MAX_PREPARED_BYTES,
    MAX_PREPARED_COMPILED_BYTES,
    MAX_PREPARED_GRAMMARS,
    Grammar,
)


class PreparedGrammars:
    """The most recently used grammars. Workers keep more of them, in the same order of use, since they use a grammar
    when it is prepared and when a row is added; so a worker has each of these when a row is added."""

    def __init__(self) -> None:
        self._grammars: OrderedDict[Grammar, int] = OrderedDict()  # with the sizes of the compiled ones
        self._num_bytes = 0
        """Size of the sources."""
        self._num_compiled_bytes = 0

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._grammars

    def add(self, grammar: Grammar, compiled_bytes: int = 0) -> None:
        """Add a grammar that has been compiled, in place of the ones that were used longest ago."""
        if self.use(grammar):
            return
        self._grammars[grammar] = compiled_bytes
        self._num_bytes += len(grammar.source)
        self._num_compiled_bytes += compiled_bytes
        while len(self._grammars) > 1 and (
            len(self._grammars) > MAX_PREPARED_GRAMMARS
            or self._num_bytes > MAX_PREPARED_BYTES
            or self._num_compiled_bytes > MAX_PREPARED_COMPILED_BYTES
        ):
            dropped, dropped_bytes = self._grammars.popitem(last=False)
            self._num_bytes -= len(dropped.source)
            self._num_compiled_bytes -= dropped_bytes

    def use(self, grammar: Grammar) -> bool:
        """Note that a row is added with this grammar. Returns whether it is compiled."""
        if grammar not in self._grammars:
            return False
        self._grammars.move_to_end(grammar)
        return True
