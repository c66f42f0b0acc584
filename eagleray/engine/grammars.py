"""Grammars of requests, which the workers compile before the requests run, while the engine steps.

Driven by the engine loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from eagleray.engine.core import EngineCore
from eagleray.engine.timeouts import GRAMMAR_TIMEOUT_SECONDS
from eagleray.errors import DeadlineExceeded
from eagleray.executor.executor import PendingCall
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import GrammarPrepared, PrepareGrammar
from eagleray.scheduler.request import AddressedChunk

MAX_ASKED = 16
"""Number of grammars that workers are asked for at a time: a step costs little however many requests wait."""


class _Asked(NamedTuple):
    begun_at: float
    call: PendingCall[GrammarPrepared]


class EngineGrammars:
    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self._asked: dict[Grammar, _Asked] = {}

    def advance(self) -> list[AddressedChunk]:
        """Ask the workers for the grammars that requests wait for. Returns the last chunks of those whose grammar
        cannot be compiled."""
        scheduler, now = self._core.scheduler, self._clock()
        chunks: list[AddressedChunk] = []
        for grammar, (begun_at, call) in list(self._asked.items()):
            if not scheduler.is_awaited(grammar):
                self._forget(grammar)
            elif (replies := call.poll()) is not None:
                failure = next((reply.failure for reply in replies.values() if reply.failure is not None), None)
                if failure is None and not all(reply.is_done for reply in replies.values()):
                    self._asked[grammar] = _Asked(begun_at, self._ask(grammar))
                    continue
                del self._asked[grammar]
                chunks += scheduler.on_grammar_prepared(grammar, failure, seconds=now - begun_at)
            elif now - begun_at > GRAMMAR_TIMEOUT_SECONDS:
                self._forget(grammar)
                chunks += scheduler.on_grammar_prepared(grammar, _late(), seconds=now - begun_at)
        if len(self._asked) < MAX_ASKED:
            for grammar in scheduler.first_unprepared_grammars(MAX_ASKED):
                if grammar not in self._asked:
                    self._asked[grammar] = _Asked(now, self._ask(grammar))
        return chunks

    def _ask(self, grammar: Grammar) -> PendingCall[GrammarPrepared]:
        return self._core.executor.begin(PrepareGrammar(grammar), GrammarPrepared)

    def _forget(self, grammar: Grammar) -> None:
        self._asked.pop(grammar).call.drop()


def _late() -> Failure:
    return Failure.of(
        DeadlineExceeded(f"no reply of every worker to the compilation of a grammar in {GRAMMAR_TIMEOUT_SECONDS:g} s")
    )
