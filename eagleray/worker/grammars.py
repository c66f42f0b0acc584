"""The compiled grammars of a worker that samples. They are compiled in a thread, while the worker takes steps."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

from eagleray.errors import CheckpointError, InvalidRequest, UserError
from eagleray.grammars.cache import GrammarCache
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.log import get_logger
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import PARAM, Grammar
from eagleray.messages.steps import GrammarPrepared

logger = get_logger(__name__)

COMPILE_TIMEOUT_SECONDS = 75.0
"""Time after which a compilation is abandoned. The limits of llguidance end it within a second, but xgrammar may need a
minute to start its process."""

MAX_THREADS = 4
"""Number of grammars that are compiled at a time, so that usual ones need not wait for a costly one."""

FIRST_WAIT_SECONDS = 0.0015
"""Time to wait for a compilation that begins while no other one runs. Most take less, and the engine asks again only
after a step."""

LARGE_VOCABULARY = 2**15
"""Number of tokens from which on the compiler is loaded at the start. llguidance holds the GIL meanwhile, for up to a
second with 150,000 tokens."""

WARM_UP_DELAY_SECONDS = 2.0
"""Time after the start until the compiler of a small vocabulary is loaded, unless a grammar comes before. Other
processes are started meanwhile."""

STACK_BYTES = 512 * 2**20
"""Stack of the thread that compiles. llguidance is recursive along chains of references, and needs up to 16 KB for each
link; the longest chains within the bounds of grammars fit. Memory is taken only for the part that is used."""


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
        self._loaded: GrammarCompiler | UserError | None = None
        self._timeout = timeout
        self._clock = clock
        self._compiled = GrammarCache[CompiledGrammar]()
        self._refused = GrammarCache[Failure]()
        self._jobs: SimpleQueue[Grammar | None] = SimpleQueue()  # None ends a thread
        self._num_threads = 0
        self._pending: dict[Grammar, threading.Event] = {}
        """Grammars that are to be compiled; an event is set afterwards."""
        self._running: dict[Grammar, float] = {}
        """Grammars that are being compiled, and when each compilation began: infinity until the compiler is loaded,
        whose slow start is no fault of a grammar."""
        self._timer = threading.Timer(WARM_UP_DELAY_SECONDS, self._warm_up)
        self._timer.daemon = True

    def warm_up(self, vocab_size: int) -> None:
        """Load the compiler before a request needs it: at once if that would delay steps later, else in another
        thread."""
        if vocab_size >= LARGE_VOCABULARY:
            self._warm_up()
        else:
            self._timer.start()

    def prepare(self, grammar: Grammar) -> GrammarPrepared:
        """Compile a grammar in a thread. Returns whether that is done; call it again until it is."""
        outcome = self._find(grammar)
        if outcome is None:
            self._begin_or_check(grammar)
            outcome = self._find(grammar)
        if outcome is None or isinstance(outcome, Failure):
            return GrammarPrepared(is_done=outcome is not None, failure=outcome)
        return GrammarPrepared(is_done=True, num_bytes=outcome.num_bytes)

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar. Waits for a thread if the cache does not have it."""
        while (outcome := self._find(grammar)) is None:
            self._begin_or_check(grammar)
            if (pending := self._pending.get(grammar)) is not None:
                pending.wait(self._timeout)
        if isinstance(outcome, Failure):
            raise RuntimeError(f"a row has a grammar that cannot be compiled: {outcome}")
        return outcome

    def close(self) -> None:
        """Stop the threads when they have compiled their grammars, and close the compiler."""
        self._timer.cancel()
        for _ in range(self._num_threads):
            self._jobs.put(None)
        if self._loaded is not None and not isinstance(self._loaded, UserError):
            self._loaded.close()

    def _find(self, grammar: Grammar) -> CompiledGrammar | Failure | None:
        """Return the outcome of compiling a grammar, if it is known."""
        return self._compiled.find(grammar) or self._refused.find(grammar)

    def _begin_or_check(self, grammar: Grammar) -> None:
        """Begin to compile a grammar, or abandon its compilation if that takes too long."""
        if grammar not in self._pending:
            done = self._pending[grammar] = threading.Event()
            self._jobs.put(grammar)
            if self._num_threads < min(len(self._pending), MAX_THREADS):
                self._num_threads += 1
                self._start_thread()
            if len(self._pending) == 1:
                done.wait(FIRST_WAIT_SECONDS)
        elif self._clock() - self._running.get(grammar, math.inf) > self._timeout:
            self._abandon(grammar)

    def _abandon(self, grammar: Grammar) -> None:
        """Refuse a grammar whose compilation does not end. Another thread takes the place of its own."""
        if self._running.pop(grammar, None) is None:
            return  # it has just ended
        reason = f"the grammar was not compiled within {self._timeout:g} s: simplify it"
        logger.error("a compilation is abandoned, its thread goes on: %s", reason)
        self._start_thread()
        self._finish(grammar, Failure.of(InvalidRequest(reason, param=PARAM)))

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name="grammars", daemon=True)
        size = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(size)

    def _run(self) -> None:
        while (grammar := self._jobs.get()) is not None:
            self._running[grammar] = math.inf
            outcome = self._compile(grammar)
            if self._running.pop(grammar, None) is None:
                return  # abandoned
            self._finish(grammar, outcome)

    def _finish(self, grammar: Grammar, outcome: CompiledGrammar | Failure) -> None:
        if isinstance(outcome, Failure):
            self._refused.put(grammar, outcome)
        else:
            self._compiled.put(grammar, outcome, num_bytes=outcome.num_bytes)
        self._pending.pop(grammar).set()

    def _compile(self, grammar: Grammar) -> CompiledGrammar | Failure:
        try:
            compiler = self._compiler()
            if grammar in self._running:
                self._running[grammar] = self._clock()
            return compiler.compile(grammar)
        except UserError as error:
            return Failure.of(error)
        except BaseException as error:  # also a panic of a library, which is no Exception
            logger.exception("a grammar cannot be compiled")
            return Failure.of(error)

    def _warm_up(self) -> None:
        with contextlib.suppress(UserError):  # the first request with a grammar gets the error
            self._compiler()

    def _compiler(self) -> GrammarCompiler:
        """Return the compiler. Raises `UserError` if it cannot be loaded, which is tried once."""
        with self._loading:
            if self._loaded is None:
                self._loaded = self._load_or_explain()
            if isinstance(self._loaded, UserError):
                raise self._loaded
            return self._loaded

    def _load_or_explain(self) -> GrammarCompiler | UserError:
        try:
            return self._load()
        except UserError as error:
            return error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            logger.exception("the compiler of grammars cannot be loaded")
            return CheckpointError(f"structured outputs cannot use this model's tokenizer: {error}")
