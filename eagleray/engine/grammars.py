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
from eagleray.scheduler.step_outputs import AddressedChunk

MAX_ASKED = 16
"""Number of grammars that workers are asked for at a time: a step costs little however many requests wait."""


class _Asked(NamedTuple):
    begun_at: float
    call: PendingCall[GrammarPrepared]


class EngineGrammars:
    def __init__(self, core: EngineCore, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._core = core
        self._clock = clock
        self.asked: dict[Grammar, _Asked] = {}
        """Grammars that the workers compile."""

    def advance(self, send_early: Callable[[list[AddressedChunk]], None]) -> list[AddressedChunk]:
        """Ask the workers for the grammars that requests wait for. Returns the last chunks of those whose grammar
        cannot be compiled. `send_early`: see `EngineCore.step`."""
        scheduler, now = self._core.scheduler, self._clock()
        chunks: list[AddressedChunk] = []
        for grammar, (begun_at, call) in list(self.asked.items()):
            if not scheduler.is_awaited(grammar):
                self._forget(grammar)
                continue
            replies = call.poll()
            failure = next((reply.failure for reply in (replies or {}).values() if reply.failure is not None), None)
            if failure is not None or (replies and all(reply.is_done for reply in replies.values())):
                del self.asked[grammar]
                num_bytes = max((reply.num_bytes for reply in (replies or {}).values()), default=0)
                chunks += scheduler.on_grammar_prepared(grammar, failure, seconds=now - begun_at, num_bytes=num_bytes)
            elif now - begun_at > GRAMMAR_TIMEOUT_SECONDS:
                self._forget(grammar)
                chunks += scheduler.on_grammar_prepared(grammar, _late(), seconds=now - begun_at)
            elif replies is not None:
                self.asked[grammar] = _Asked(begun_at, self._ask(grammar))
        if len(self.asked) < MAX_ASKED:
            self._ask_for_others(send_early, now)
        return chunks

    def _ask_for_others(self, send_early: Callable[[list[AddressedChunk]], None], now: float) -> None:
        scheduler = self._core.scheduler
        grammars = [one for one in scheduler.first_unprepared_grammars(MAX_ASKED) if one not in self.asked]
        if chunks := scheduler.announce_starts(grammars):
            send_early(chunks)
        for grammar in grammars:
            self.asked[grammar] = _Asked(now, self._ask(grammar))

    def _ask(self, grammar: Grammar) -> PendingCall[GrammarPrepared]:
        return self._core.executor.begin(PrepareGrammar(grammar), GrammarPrepared)

    def _forget(self, grammar: Grammar) -> None:
        self.asked.pop(grammar).call.drop()


def _late() -> Failure:
    return Failure.of(
        DeadlineExceeded(f"waited {GRAMMAR_TIMEOUT_SECONDS:g} s for every worker to compile the grammar of the request")
    )
