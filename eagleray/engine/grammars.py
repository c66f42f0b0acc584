"""Grammars of requests, which the workers compile before the requests run, while the engine steps.

Driven by the engine loop.
"""

from __future__ import annotations

from eagleray.engine.core import EngineCore
from eagleray.executor.executor import PendingCall
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import GrammarPrepared, PrepareGrammar
from eagleray.scheduler.request import AddressedChunk


class EngineGrammars:
    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._calls: dict[Grammar, PendingCall[GrammarPrepared]] = {}

    def advance(self) -> list[AddressedChunk]:
        """Ask the workers for the grammars that requests wait for. Returns the last chunks of those whose grammar
        cannot be compiled."""
        chunks: list[AddressedChunk] = []
        for grammar in self._core.scheduler.unprepared_grammars:
            if grammar not in self._calls:
                self._calls[grammar] = self._ask(grammar)
            elif (replies := self._calls[grammar].poll()) is not None:
                failure = next((one.failure for one in replies.values() if one.failure is not None), None)
                if failure is None and not all(one.is_done for one in replies.values()):
                    self._calls[grammar] = self._ask(grammar)
                    continue
                del self._calls[grammar]
                chunks += self._core.scheduler.on_grammar_prepared(
                    grammar, None if failure is None else failure.message
                )
        return chunks

    def _ask(self, grammar: Grammar) -> PendingCall[GrammarPrepared]:
        return self._core.executor.begin(PrepareGrammar(grammar), GrammarPrepared)
