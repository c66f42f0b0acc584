"""The compiled grammars of a worker that samples. They are compiled in a thread, while the worker takes steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from eagleray.errors import UserError
from eagleray.grammars.cache import GrammarCache
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import GrammarPrepared


class WorkerGrammars:
    """`load` makes the compiler, which may take a second for a large vocabulary."""

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._lock = threading.Lock()
        self._cache: GrammarCache | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._pending: dict[Grammar, Future[CompiledGrammar]] = {}

    def prepare(self, grammar: Grammar) -> GrammarPrepared:
        """Compile a grammar in the thread. Returns whether that is done; call it again until it is."""
        if self._cache is not None and grammar in self._cache:
            return GrammarPrepared(is_done=True)
        pending = self._pending.get(grammar)
        if pending is None:
            self._pending[grammar] = self._thread.submit(self.get, grammar)
            return GrammarPrepared(is_done=False)
        if not pending.done():
            return GrammarPrepared(is_done=False)
        del self._pending[grammar]
        try:
            pending.result()
        except UserError as error:
            return GrammarPrepared(is_done=True, failure=Failure.of(error))
        return GrammarPrepared(is_done=True)

    def get(self, grammar: Grammar) -> CompiledGrammar:
        """Return the compiled grammar, which is compiled here if it is not in the cache any more."""
        with self._lock:
            if self._cache is None:
                self._cache = GrammarCache(self._load())
        return self._cache.get(grammar)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)
