"""The compiled grammars of a worker that samples. They are compiled in a thread, while the worker takes steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from eagleray.errors import InvalidRequest, UserError
from eagleray.grammars.cache import GrammarCache
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import GrammarPrepared

logger = get_logger(__name__)

COMPILE_TIMEOUT_SECONDS = 10.0
"""Time after which a compilation is abandoned. The limits of the libraries end it much sooner."""

FIRST_WAIT_SECONDS = 0.0015
"""Time to wait for a compilation that begins while no other one runs. Most take less, and the engine asks again only
after a step."""

WARM_UP_DELAY_SECONDS = 2.0
"""Time after the start until the compiler is loaded, unless a grammar comes before: other processes start meanwhile."""

STACK_BYTES = 512 * 2**20
"""Stack of the thread that compiles. llguidance is recursive along chains of references, and needs up to 16 KB for each
link; the longest chains within the bounds of grammars fit. Memory is taken only for the part that is used."""

Jobs = SimpleQueue[Grammar | None]
"""Grammars for a thread to compile; None ends it."""


class _Running(NamedTuple):
    grammar: Grammar
    begun_at: float


class WorkerGrammars:
    """`load` makes the compiler, which may take a second for a large vocabulary. Used by the worker's thread alone."""

    def __init__(
        self,
        load: Callable[[], GrammarCompiler],
        *,
        timeout: float = COMPILE_TIMEOUT_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._loaded: GrammarCompiler | None = None
        self._timeout = timeout
        self._clock = clock
        self._cache = GrammarCache()
        self._jobs: Jobs | None = None
        self._pending: dict[Grammar, threading.Event] = {}
        """Grammars that are compiled, in this order; an event is set afterwards."""
        self._running: _Running | None = None
        self._timer = threading.Timer(WARM_UP_DELAY_SECONDS, self._warm_up)
        self._timer.daemon = True

    def warm_up_later(self) -> None:
        """Load the compiler in another thread, so that the first request with a grammar need not wait for it."""
        self._timer.start()

    def prepare(self, grammar: Grammar) -> GrammarPrepared:
        """Compile a grammar in the thread. Returns whether that is done; call it again until it is."""
        outcome = self._cache.find(grammar)
        if outcome is None:
            self._begin_or_check(grammar)
            outcome = self._cache.find(grammar)
        return GrammarPrepared(is_done=outcome is not None, failure=outcome if isinstance(outcome, Failure) else None)

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar. Waits for the thread if the cache does not have it."""
        while (outcome := self._cache.find(grammar)) is None:
            self._begin_or_check(grammar)
            if (pending := self._pending.get(grammar)) is not None:
                pending.wait(self._timeout)
        if isinstance(outcome, Failure):
            raise RuntimeError(f"a row has a grammar that cannot be compiled: {outcome}")
        return outcome

    def close(self) -> None:
        """Stop the thread when it has compiled its grammar."""
        self._timer.cancel()
        if self._jobs is not None:
            self._jobs.put(None)

    def _begin_or_check(self, grammar: Grammar) -> None:
        """Begin to compile a grammar. If it has begun, abandon the compilation that runs if it takes too long."""
        running = self._running
        if grammar not in self._pending:
            is_first = not self._pending
            done = self._pending[grammar] = threading.Event()
            (self._jobs or self._start_thread()).put(grammar)
            if is_first:
                done.wait(FIRST_WAIT_SECONDS)
        elif running is not None and self._clock() - running.begun_at > self._timeout:
            self._abandon(running.grammar)

    def _abandon(self, grammar: Grammar) -> None:
        """Refuse a grammar whose compilation does not end, and compile the others in another thread."""
        reason = f"the grammar was not compiled within {self._timeout:g} s: simplify it"
        logger.error("a compilation is abandoned, its thread goes on: %s", reason)
        jobs = self._start_thread()
        self._finish(grammar, Failure.of(InvalidRequest(reason, param="structured_outputs")))
        for other in self._pending:
            jobs.put(other)

    def _start_thread(self) -> Jobs:
        jobs: Jobs = SimpleQueue()
        self._jobs, self._running = jobs, None
        thread = threading.Thread(target=self._run, args=(jobs,), name="grammars", daemon=True)
        size = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(size)
        return jobs

    def _run(self, jobs: Jobs) -> None:
        while (grammar := jobs.get()) is not None:
            self._running = _Running(grammar, self._clock())
            outcome = self._compile(grammar)
            if jobs is not self._jobs:
                return  # abandoned
            self._running = None
            self._finish(grammar, outcome)

    def _finish(self, grammar: Grammar, outcome: CompiledGrammar | Failure) -> None:
        self._cache.put(grammar, outcome)
        self._pending.pop(grammar).set()

    def _compile(self, grammar: Grammar) -> CompiledGrammar | Failure:
        try:
            return self._compiler().compile(grammar)
        except UserError as error:
            return Failure.of(error)
        except BaseException as error:  # also a panic of a library, which is no Exception
            logger.exception("a grammar cannot be compiled")
            return Failure.of(error)

    def _warm_up(self) -> None:
        with contextlib.suppress(UserError):  # the first request with a grammar gets the error
            self._compiler()

    def _compiler(self) -> GrammarCompiler:
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load()
            return self._loaded
