"""Compilation beside the steps of a worker: once for each grammar, in a thread, and never for ever."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from grammar_tokenizers import Words

from eagleray.errors import CheckpointError, InvalidRequest
from eagleray.grammars import cache
from eagleray.grammars.cache import GrammarCache
from eagleray.grammars.matcher import CompiledGrammar, GrammarCompiler
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.steps import GrammarPrepared
from eagleray.worker import grammars as grammars_module
from eagleray.worker.grammars import WorkerGrammars

TIMEOUT = 20.0
WORDS = Words.make()


class Panic(BaseException):
    """Errors of libraries in Rust are no `Exception`."""


class SlowCompiler(GrammarCompiler):
    """Compiles when its gate is open. The sources `refused` and `panic` raise, `hang` never returns."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = threading.Event()
        self.hanging = threading.Event()
        self.end = threading.Event()
        self.sources: list[str] = []

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        self.sources.append(grammar.source)
        self.begun.set()
        match grammar.source:
            case "refused":
                raise InvalidRequest("too large")
            case "panic":
                raise Panic("index out of bounds")
            case "hang":
                self.hanging.set()
                assert self.end.wait(TIMEOUT)
        assert self.gate.wait(TIMEOUT)
        return WORDS.compiler.compile(Grammar(kind="regex", source="a"))


def regex(source: str) -> Grammar:
    return Grammar(kind="regex", source=source)


@contextmanager
def worker_grammars(
    compiler: SlowCompiler, load: Callable[[], GrammarCompiler] | None = None, clock: Callable[[], float] = lambda: 0.0
) -> Iterator[WorkerGrammars]:
    grammars = WorkerGrammars(load or (lambda: compiler), timeout=10.0, clock=clock)
    try:
        yield grammars
    finally:
        compiler.gate.set()
        compiler.end.set()
        grammars.close()


def wait_until_done(grammars: WorkerGrammars, grammar: Grammar) -> GrammarPrepared:
    """Ask until the grammar is compiled, in the place of an engine."""
    while not (prepared := grammars.prepare(grammar)).is_done:
        threading.Event().wait(0.001)
    return prepared


def test_worker_grammars_compile_once_for_several_requests() -> None:
    compiler = SlowCompiler()
    with worker_grammars(compiler) as grammars:
        assert [grammars.prepare(regex("a")).is_done for _ in range(3)] == [False] * 3
        assert compiler.begun.wait(TIMEOUT)
        compiler.gate.set()
        assert wait_until_done(grammars, regex("a")).failure is None
        assert grammars.get(regex("a")) is grammars.get(regex("a"))
        assert compiler.sources == ["a"]


@pytest.mark.parametrize(("source", "is_user_error"), [("refused", True), ("panic", False)])
def test_worker_grammars_report_a_failure_to_every_request(source: str, is_user_error: bool) -> None:
    compiler = SlowCompiler()
    compiler.gate.set()
    with worker_grammars(compiler) as grammars:
        failures = [wait_until_done(grammars, regex(source)).failure for _ in range(2)]
        assert failures[0] is not None and failures[0] == failures[1]
        assert failures[0].is_user_error is is_user_error
        assert compiler.sources == [source]
        assert wait_until_done(grammars, regex("a")).failure is None


def test_worker_grammars_abandon_a_compilation_that_hangs_and_compile_the_others() -> None:
    compiler = SlowCompiler()
    compiler.gate.set()
    now = [0.0]
    with worker_grammars(compiler, clock=lambda: now[0]) as grammars:
        grammars.prepare(regex("hang"))
        assert compiler.hanging.wait(TIMEOUT)
        assert wait_until_done(grammars, regex("a")).failure is None  # by another thread
        assert not grammars.prepare(regex("hang")).is_done
        now[0] = 11.0
        failure = grammars.prepare(regex("hang")).failure
        assert failure is not None and failure.is_user_error and "not compiled within 10 s" in failure.message
        assert wait_until_done(grammars, regex("b")).failure is None


def test_worker_grammars_that_were_evicted_are_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_GRAMMARS", 1)
    compiler = SlowCompiler()
    compiler.gate.set()
    with worker_grammars(compiler) as grammars:
        for source in "ab":
            assert wait_until_done(grammars, regex(source)).failure is None
        assert grammars.get(regex("a")).matcher().failure is None
        assert compiler.sources == ["a", "b", "a"]


def test_worker_grammars_do_not_count_the_start_of_the_compiler_as_compilation() -> None:
    compiler, loads, may_load = SlowCompiler(), threading.Event(), threading.Event()

    def load() -> GrammarCompiler:
        loads.set()
        assert may_load.wait(TIMEOUT)
        return compiler

    now = itertools.count(step=1000.0)
    with worker_grammars(compiler, load, clock=lambda: next(now)) as grammars:
        grammars.prepare(regex("a"))
        assert loads.wait(TIMEOUT)
        assert not grammars.prepare(regex("a")).is_done
        may_load.set()
        assert compiler.begun.wait(TIMEOUT)
        assert wait_until_done(grammars, regex("a")).failure is not None


@pytest.mark.parametrize("vocab_size", [1000, 150_000])
def test_worker_grammars_load_the_compiler_in_advance_once(monkeypatch: pytest.MonkeyPatch, vocab_size: int) -> None:
    monkeypatch.setattr(grammars_module, "WARM_UP_DELAY_SECONDS", 0.0)
    compiler, loaded = SlowCompiler(), threading.Event()
    compiler.gate.set()
    num_loads = []

    def load() -> GrammarCompiler:
        num_loads.append(1)
        loaded.set()
        return compiler

    with worker_grammars(compiler, load) as grammars:
        grammars.warm_up(vocab_size)
        assert loaded.wait(TIMEOUT)
        assert wait_until_done(grammars, regex("a")).failure is None
    assert len(num_loads) == 1


def test_worker_grammars_that_are_refused_displace_none_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_GRAMMARS", 1)
    compiler = SlowCompiler()
    compiler.gate.set()
    with worker_grammars(compiler) as grammars:
        for source in ("a", "refused", "panic"):
            wait_until_done(grammars, regex(source))
        grammars.get(regex("a"))
        assert compiler.sources == ["a", "refused", "panic"]


@pytest.mark.parametrize("error", [CheckpointError("an unknown tokenizer"), Panic("an unknown tokenizer")])
def test_worker_grammars_of_a_tokenizer_that_does_not_fit_refuse_every_grammar(error: BaseException) -> None:
    num_loads = []

    def load() -> GrammarCompiler:
        num_loads.append(1)
        raise error

    with worker_grammars(SlowCompiler(), load) as grammars:
        grammars.warm_up(150_000)
        for source in "ab":
            failure = wait_until_done(grammars, regex(source)).failure
            assert failure is not None and failure.is_user_error and "an unknown tokenizer" in failure.message
    assert len(num_loads) == 1


def test_grammar_cache_keeps_the_last_used_within_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_GRAMMARS", 3)
    monkeypatch.setattr(cache, "MAX_SOURCE_BYTES", 10)
    outcome = Failure.noticed("refused")
    kept, made, large = GrammarCache[Failure](), [regex(str(number)) for number in range(4)], regex("x" * 9)
    for grammar in made[:3]:
        kept.put(grammar, outcome)
    assert kept.find(made[0]) is outcome
    kept.put(made[3], outcome)
    assert [kept.find(grammar) is outcome for grammar in made] == [True, False, True, True]
    kept.put(large, outcome)
    assert [kept.find(grammar) is outcome for grammar in (*made, large)] == [False, False, False, True, True]
    kept.put(regex("y" * 50), outcome)
    assert len(kept) == 1 and kept.find(regex("y" * 50)) is outcome


def test_grammar_cache_keeps_the_last_used_within_their_compiled_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "MAX_COMPILED_BYTES", 100)
    kept, outcome = GrammarCache[Failure](), Failure.noticed("refused")
    for source, num_bytes in (("a", 60), ("b", 40), ("b", 30), ("c", 10)):
        kept.put(regex(source), outcome, num_bytes=num_bytes)
    assert len(kept) == 3
    kept.put(regex("d"), outcome, num_bytes=1)
    assert [kept.find(regex(source)) is outcome for source in "abcd"] == [False, True, True, True]
