"""Grammars that an engine has its worker compile, while it steps."""

from __future__ import annotations

import math
from typing import Any

from engine_fakes import CountingGroup
from output_chunks import addressed_chunks

from eagleray.config.build import build_config
from eagleray.engine.grammars import MAX_ASKED, EngineGrammars
from eagleray.engine.startup import start_engine
from eagleray.engine.timeouts import GRAMMAR_TIMEOUT_SECONDS
from eagleray.errors import InvalidRequest
from eagleray.executor.executor import Executor
from eagleray.identity import ClientId
from eagleray.messages.failure import Failure
from eagleray.messages.grammars import Grammar
from eagleray.messages.outputs import Chunk, FinishReason
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import Call, GrammarPrepared, PrepareGrammar, WorkerReply

CLIENT = ClientId("i", 0)
G = Grammar(kind="regex", source="a")


class CompilingGroup(CountingGroup):
    """A worker that has compiled the grammars of `ready`, refuses those of `refused`, and never replies about those of
    `silent`."""

    def __init__(self) -> None:
        super().__init__()
        self.ready: set[Grammar] = set()
        self.refused: set[Grammar] = set()
        self.silent: set[Grammar] = set()

    def send(self, call: Call) -> None:
        if isinstance(call.body, PrepareGrammar) and call.body.grammar in self.silent:
            self.calls.append(call.body)
        else:
            super().send(call)

    def _answer(self, body: Any) -> WorkerReply:
        if isinstance(body, PrepareGrammar):
            failure = Failure.of(InvalidRequest("too large")) if body.grammar in self.refused else None
            return GrammarPrepared(is_done=failure is not None or body.grammar in self.ready, failure=failure)
        return super()._answer(body)

    @property
    def asked(self) -> list[Grammar]:
        return [call.grammar for call in self.calls if isinstance(call, PrepareGrammar)]


class CompilingEngine:
    def __init__(self) -> None:
        self.group = CompilingGroup()
        config = build_config(enable_prefix_caching=False)
        self.core = start_engine(config, Executor(self.group), deadline=math.inf).core
        self.now = 0.0
        self.grammars = EngineGrammars(self.core, clock=lambda: self.now)
        self.chunks: dict[str, list[Chunk]] = {}

    def add(self, name: str, grammar: Grammar | None = None, *, announce_start: bool = False) -> None:
        self.core.scheduler.add(
            Generate(
                request_id=name,
                client=CLIENT,
                prompt_token_ids=[1] * 5,
                sampling=Sampling(seed=0, grammar=grammar),
                stopping=Stopping(max_tokens=3),
                announce_start=announce_start,
            )
        )

    def advance(self) -> None:
        self._take(self.grammars.advance(self._take))
        self._take(addressed_chunks(self.core.step(self._take)))

    def run(self) -> None:
        while self.core.scheduler.has_work:
            self.advance()

    def last(self, name: str) -> Chunk:
        return self.chunks[name][-1]

    def _take(self, addressed: Any) -> None:
        for _, chunk in addressed:
            self.chunks.setdefault(chunk.request_id, []).append(chunk)


def test_engine_asks_until_the_grammar_is_compiled_while_others_run() -> None:
    engine = CompilingEngine()
    engine.add("a", G)
    engine.add("free")
    engine.run()
    assert engine.last("free").finish_reason is FinishReason.LENGTH and "a" not in engine.chunks
    num_asked = len(engine.group.asked)
    engine.group.ready.add(G)
    for _ in range(3):
        engine.advance()
    engine.run()
    assert engine.last("a").finish_reason is FinishReason.LENGTH
    assert num_asked >= 3 and len(engine.group.asked) <= num_asked + 2
    engine.add("b", G)
    engine.run()
    assert engine.last("b").finish_reason is FinishReason.LENGTH and len(engine.group.asked) <= num_asked + 2


def test_engine_asks_once_for_the_grammar_of_several_requests() -> None:
    engine = CompilingEngine()
    engine.group.silent.add(G)
    for name in "abc":
        engine.add(name, G)
    engine.advance()
    engine.advance()
    assert engine.group.asked == [G]


def test_engine_asks_for_a_few_grammars_at_a_time() -> None:
    engine = CompilingEngine()
    grammars = [Grammar(kind="regex", source=str(number)) for number in range(2 * MAX_ASKED)]
    engine.group.silent = set(grammars)
    for grammar in grammars:
        engine.add(grammar.source, grammar)
    engine.advance()
    assert engine.group.asked == grammars[:MAX_ASKED]


def test_engine_fails_every_request_of_a_refused_grammar() -> None:
    engine = CompilingEngine()
    engine.group.refused.add(G)
    engine.add("a", G)
    engine.add("b", G)
    engine.add("free")
    engine.advance()
    engine.advance()
    for name in "ab":
        assert (engine.last(name).error, engine.last(name).is_user_error) == ("too large", True)
    engine.run()
    assert engine.last("free").finish_reason is FinishReason.LENGTH


def test_engine_fails_requests_whose_worker_never_answers_and_says_what_it_waited_for() -> None:
    engine = CompilingEngine()
    engine.group.silent.add(G)
    engine.add("a", G)
    engine.add("free")
    engine.run()
    engine.now = GRAMMAR_TIMEOUT_SECONDS
    engine.advance()
    assert "a" not in engine.chunks and engine.last("free").finish_reason is FinishReason.LENGTH
    engine.now += 1
    engine.advance()
    chunk = engine.last("a")
    assert chunk.error is not None and "waited 90 s for every worker to compile" in chunk.error
    assert not chunk.is_user_error and not engine.core.scheduler.has_unprepared_grammars


def test_engine_fails_requests_whose_worker_never_finishes_although_it_answers() -> None:
    engine = CompilingEngine()
    engine.add("a", G)
    for engine.now in (0.0, GRAMMAR_TIMEOUT_SECONDS, GRAMMAR_TIMEOUT_SECONDS + 1):
        engine.advance()
    assert "waited 90 s" in (engine.last("a").error or "")


def test_engine_announces_one_request_of_each_grammar_before_the_workers_compile_it() -> None:
    engine = CompilingEngine()
    engine.group.silent |= {G, Grammar(kind="regex", source="b")}
    announced_before: list[list[Grammar]] = []
    engine.add("new", G)
    engine.add("b", Grammar(kind="regex", source="b"))
    engine.add("sent again", G, announce_start=True)
    engine.add("also sent again", G, announce_start=True)

    def send_early(chunks: Any) -> None:
        assert [(chunk.request_id, chunk.is_started) for _, chunk in chunks] == [("sent again", True)]
        announced_before.append(engine.group.asked)

    engine.grammars.advance(send_early)
    assert announced_before == [[]] and len(engine.group.asked) == 2


def test_engine_forgets_a_grammar_that_nobody_waits_for() -> None:
    engine = CompilingEngine()
    engine.group.silent.add(G)
    engine.add("a", G)
    engine.advance()
    engine.core.scheduler.abort(CLIENT, ["a"])
    engine.advance()
    engine.group.silent.clear()
    engine.group.ready.add(G)
    engine.add("a", G)
    engine.advance()
    assert engine.group.asked == [G, G]


def test_engine_time_of_a_grammar_begins_anew_when_nobody_waited_for_it_meanwhile() -> None:
    engine = CompilingEngine()
    engine.add("a", G)
    engine.advance()
    engine.core.scheduler.abort(CLIENT, ["a"])
    engine.advance()
    engine.now = GRAMMAR_TIMEOUT_SECONDS + 1
    engine.add("a", G)
    engine.advance()
    engine.advance()
    assert "a" not in engine.chunks
