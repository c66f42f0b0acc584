"""Compiled grammars by content, the last used ones first. Used from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict

from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.messages.grammars import Grammar

MAX_GRAMMARS = 256
MAX_SOURCE_BYTES = 16 * 2**20
"""Bound of the sources of all cached grammars together, since what they compile to grows with them."""


class GrammarCache:
    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __contains__(self, grammar: Grammar) -> bool:
        return grammar in self._compiled

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar, which is compiled here if the cache does not have it. Raises `InvalidRequest` as
        `GrammarCompiler.compile` does."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        compiled = self._compiler.compile(grammar)  # without the lock: others may use the cache meanwhile
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._num_bytes += len(grammar.source)
            while len(self._compiled) > 1 and (
                len(self._compiled) > MAX_GRAMMARS or self._num_bytes > MAX_SOURCE_BYTES
            ):
                dropped, _ = self._compiled.popitem(last=False)
                self._num_bytes -= len(dropped.source)
        return compiled
