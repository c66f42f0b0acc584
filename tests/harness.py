"""A whole engine in the test's own process: scheduler, executor, worker and model, without sockets.

Start-up and step are the engine's own; only the client is replaced by lists.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from forked_programs import fork_server_of_tests
from output_chunks import addressed_chunks

from eagleray.config.build import build_config
from eagleray.engine.grammars import EngineGrammars
from eagleray.engine.startup import start_engine
from eagleray.executor.choose import open_executor
from eagleray.identity import ClientId, EngineId
from eagleray.messages.arrays import Array
from eagleray.messages.outputs import PromptLogprobs, TokenLogprobs
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.scheduler.step_outputs import AddressedChunk
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

START_SECONDS = 120.0
CLIENT = ClientId("test", 0)
REQUEST_FIELDS = (
    "priority",
    "cache_salt",
    "output_token_ids",
    "prompt_logprobs_from",
    "is_suspect",
    "adapter",
    "pools",
)


@dataclass
class Answer:
    """All output of an engine for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    pooled: Array | None = None
    was_announced: bool = False
    """Whether the start of the request was announced, as for a suspect."""
    error: str | None = None


class LocalEngine:
    def __init__(self, checkpoint: Path | None, **options: Any) -> None:
        model = None if checkpoint is None else str(checkpoint)
        config = build_config(model=model, **{"num_threads": 1, **options})
        self._ends = ExitStack()
        self._ends.callback(remove_runtime_dir, runtime_dir := make_runtime_dir())
        try:
            self.executor = open_executor(
                EngineId("test", 0), config, runtime_dir=runtime_dir, fork_server=fork_server_of_tests()
            )
            self._ends.callback(self.executor.close)
            started = start_engine(config, self.executor, deadline=time.monotonic() + START_SECONDS)
        except BaseException:
            self._ends.close()
            raise
        # With it at the latest: most tests make one and forget it.
        self._close = weakref.finalize(self, self._ends.close)
        self.core, self.info = started.core, started.info
        self._grammars = EngineGrammars(self.core)
        self.answers: dict[str, Answer] = {}

    def __enter__(self) -> LocalEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the workers; needed if they are processes."""
        self._close()

    def add(self, request_id: str, prompt: Sequence[int], *, max_tokens: int = 16, **kwargs: Any) -> None:
        """Add a request. `kwargs`: fields of `Sampling`, of `Stopping`, and other fields of `Generate`."""
        stopping = {"max_tokens": max_tokens, "min_tokens": kwargs.get("min_tokens", 0)}
        for name in ("eos_token_ids", "stop_token_ids"):
            if name in kwargs:
                stopping[name] = kwargs.pop(name)
        request = {name: kwargs.pop(name) for name in REQUEST_FIELDS if name in kwargs}
        self.answers[request_id] = Answer()
        self.core.scheduler.add(
            Generate(
                request_id=request_id,
                client=CLIENT,
                prompt_token_ids=list(prompt),
                sampling=Sampling(**{"seed": 0, "temperature": 0.0, **kwargs}),
                stopping=Stopping(**stopping),
                **request,
            )
        )

    def abort(self, request_id: str) -> None:
        abort = Abort(CLIENT, [request_id])
        self._take(self.core.scheduler.abort(abort.client, abort.request_ids))

    def step(self) -> None:
        if self.core.scheduler.has_unprepared_grammars:
            self._take(self._grammars.advance(self._take))
        self._take(addressed_chunks(self.core.step(self._take)))

    def run(self) -> dict[str, Answer]:
        """Step until the engine is idle, and return every answer so far."""
        while self.core.scheduler.has_work or self.core.scheduler.has_unprepared_grammars:
            self.step()
        return self.answers

    def _take(self, chunks: Sequence[AddressedChunk]) -> None:
        for _, chunk in chunks:
            answer = self.answers[chunk.request_id]
            assert answer.finish_reason is None, f"{chunk.request_id} was told something after its end"
            answer.token_ids += chunk.token_ids
            answer.logprobs += chunk.logprobs
            if chunk.prompt_logprobs is not None:
                answer.prompt_logprobs.append(chunk.prompt_logprobs)
            answer.pooled = chunk.pooled
            answer.num_cached_tokens += chunk.num_cached_tokens
            answer.was_announced |= chunk.is_started
            answer.finish_reason = chunk.finish_reason
            answer.stop_token_id = chunk.stop_token_id
            answer.error = chunk.error


def random_prompt(seed: int, length: int, vocab_size: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab_size, size=length).tolist()
