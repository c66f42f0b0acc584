"""The client of the engines, and the only one: the API server and `LLM` both use it.

Owns its inbox and outbox, the tokenizer, and every request from `generate` to its end. Whoever made it runs `run` in a
task and closes it with `close`. Everything happens in one event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eagleray.client.generation_config import eos_token_ids
from eagleray.client.in_flight import InFlight, Request
from eagleray.client.mailboxes import Inbox, Outbox
from eagleray.client.preprocess import Preprocessor, Prompt, check_text
from eagleray.client.request_state import RequestState
from eagleray.client.stream import RequestStream
from eagleray.client.tokenizer import Tokenizer
from eagleray.client.worker_calls import WorkerCalls
from eagleray.config import Config
from eagleray.config.resolve import checkpoint_dir, tokenizer_dir
from eagleray.errors import ChannelClosed, DeadlineExceeded, EngineFailed, InvalidRequest, Unavailable
from eagleray.identity import ClientId, EngineId
from eagleray.messages.lifecycle import Attach, ClientStarted, Stop, SupervisorToMember
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.outputs import Chunks, EngineStats, EngineToClient, WorkersReturned
from eagleray.messages.plain import pack_arguments
from eagleray.messages.requests import Abort, CallWorkers
from eagleray.messages.sampling import SamplingParams

__all__ = ["Client"]

SUPERVISOR: Literal["supervisor"] = "supervisor"
SEED_BITS = 63

CALL_SECONDS = 600.0
"""What a call of a worker extension gets if its caller does not say."""

ANSWER_SECONDS = 2.0
"""An engine that gives a call up says which ranks it waited for: how much longer to wait for that word."""


class Client:
    """Make one with `create`, inside the event loop that it is to live in."""

    def __init__(
        self, client_id: ClientId, *, inbox: Inbox, outbox: Outbox, preprocessor: Preprocessor, seed: int | None
    ) -> None:
        self.address = inbox.address
        self.stopping = asyncio.Event()
        """Set when the supervisor wants this client to end: nothing new is taken in then."""
        self.grace = 0.0
        """Seconds that running requests get once `stopping` is set."""
        self._client_id = client_id
        self._inbox = inbox
        self._outbox = outbox
        self._preprocessor = preprocessor
        self._draw_seed = partial(secrets.randbits if seed is None else random.Random(seed).getrandbits, SEED_BITS)
        self._serials = itertools.count()
        self._engines: dict[EngineId, EngineInfo] = {}
        self._stats: dict[EngineId, EngineStats] = {}
        self._lost: EngineFailed | None = None
        """Why there is no engine, if the last one has left."""
        self._engines_changed = asyncio.Event()
        self._in_flight = InFlight(on_abort=self._tell_abort)
        self._worker_calls = WorkerCalls()
        self._is_closed = False

    @classmethod
    def create(cls, client_id: ClientId, config: Config, *, inbox: Inbox, outbox: Outbox) -> Client:
        """Reads the tokenizer. Raises `CheckpointError` or `ConfigError` if it cannot."""
        model = config.model
        tokenizer = None
        if not model.skip_tokenizer_init:
            template = None if model.chat_template is None else Path(model.chat_template).expanduser()
            tokenizer = Tokenizer.load(tokenizer_dir(model), chat_template=template)
        preprocessor = Preprocessor(
            client=client_id,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids(checkpoint_dir(model)) or (tokenizer.eos_token_ids if tokenizer else ()),
            max_logprobs=model.max_logprobs,
        )
        return cls(client_id, inbox=inbox, outbox=outbox, preprocessor=preprocessor, seed=model.seed)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under `skip_tokenizer_init`."""
        return self._preprocessor.tokenizer

    @property
    def engine_info(self) -> EngineInfo | None:
        """What is served; None while there is no engine."""
        return next(iter(self._engines.values()), None)

    @property
    def stats(self) -> EngineStats | None:
        """The newest report of the engine; None without an engine, or before its first."""
        return next((self._stats[engine] for engine in self._engines if engine in self._stats), None)

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended, and calls of the worker extension."""
        return len(self._in_flight) + len(self._worker_calls)

    async def run(self) -> None:
        """Read the inbox until `close`. Whatever else ends this ends all requests."""
        try:
            while True:
                self._handle(await self._inbox.receive())
        except (ChannelClosed, asyncio.CancelledError):  # closing an inbox cancels who waits for it
            if not self._is_closed:
                raise
        finally:
            for engine in list(self._engines):
                self._leave(engine, "this client no longer hears it")

    async def wait_until_ready(self, timeout: float) -> EngineInfo:
        """Wait for an engine, at most `timeout` seconds.

        Raises `EngineFailed` if one has left and there is no other, `DeadlineExceeded` if none came.
        """
        try:
            async with asyncio.timeout(timeout):
                while self.engine_info is None:
                    if self._lost is not None:
                        raise self._lost
                    self._engines_changed.clear()
                    await self._engines_changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine was ready within {timeout:.0f} s") from None
        return self.engine_info

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Send a request to an engine. `request_id`: unique among those in flight; by default one is made.

        Raises `InvalidRequest` for what cannot be done, `Unavailable` while no engine takes requests.
        """
        engine = self._choose_engine()
        info, serial = self._engines[engine], next(self._serials)
        name = f"{self._client_id.label}-{serial}" if request_id is None else request_id
        check_text(name, "request_id")
        if name in self._in_flight:
            raise InvalidRequest(
                f"request id {name!r} is in use: the ids of running requests must be unique", param="request_id"
            )
        token_ids = self._preprocessor.tokenize(prompt, info)
        messages = self._preprocessor.requests(
            token_ids,
            params,
            info,
            # The engine gets names that are never used again: what it still says of an aborted request is nobody's.
            request_id=f"{name}#{serial}",
            seed=self._draw_seed() if params.seed is None else params.seed,
            priority=priority,
            cache_salt=cache_salt,
        )
        state = RequestState(
            name, prompt=prompt.text, prompt_token_ids=token_ids, params=params, tokenizer=self.tokenizer
        )
        for message in messages:  # first: what cannot be sent is not in flight
            self._outbox.send(engine, message)
        return self._in_flight.add(state, engine, [message.request_id for message in messages])

    async def call_workers(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, timeout: float | None
    ) -> list[Any]:
        """Call a method of the worker extension on every worker -> what each returned, in order of rank.

        Arguments and results: see `messages.plain`. `timeout`: seconds that the workers have, all together; None: ten
        minutes. When it is over the caller goes on, but the method does not end on the workers.

        Raises `InvalidRequest` for what cannot be called or sent, `RequestFailed` if the method raised on a rank,
        `EngineFailed` if the engine ended, `DeadlineExceeded`, and `Unavailable` while no engine takes requests.
        """
        check_text(method, "method")
        seconds = CALL_SECONDS if timeout is None else timeout
        if not (isinstance(seconds, int | float) and 0 < seconds < math.inf):
            raise InvalidRequest(f"`timeout` is a number of seconds above 0, but this is {timeout!r}", param="timeout")
        try:
            arguments = pack_arguments(args, kwargs)
        except TypeError as error:
            raise InvalidRequest(str(error), param="args") from None
        engine = self._choose_engine()
        with self._worker_calls.open(engine, method) as call:
            message = CallWorkers(
                client=self._client_id, call_id=call.call_id, method=method, arguments=arguments, timeout=seconds
            )
            self._outbox.send(engine, message)
            return await call.result(seconds + ANSWER_SECONDS)

    async def close(self) -> None:
        """Abort what runs, and end `run`. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._worker_calls.fail(Unavailable("this client was closed before the workers had answered"))
        for request in self._in_flight:
            self._in_flight.abort(request)
        self._inbox.close()
        self._outbox.close()

    def _choose_engine(self) -> EngineId:
        """The one with the fewest requests."""
        if self._is_closed or self.stopping.is_set():
            raise Unavailable("this client is stopping and takes no new requests")
        if not self._engines:
            raise Unavailable(f"no engine is ready{f': {self._lost}' if self._lost else ', try again in a moment'}")
        if len(self._engines) == 1:
            return next(iter(self._engines))
        load = self._in_flight.load()
        return min(self._engines, key=lambda engine: load[engine])

    def _handle(self, message: SupervisorToMember | EngineToClient) -> None:
        match message:
            case Chunks(engine, chunks):
                if unwanted := self._in_flight.deliver(chunks):
                    self._outbox.send(engine, Abort(self._client_id, unwanted))
            case EngineStats(engine=engine):
                self._stats[engine] = message
            case WorkersReturned():
                self._worker_calls.deliver(message)
            case Attach(supervisor, members):
                self._outbox.connect(SUPERVISOR, supervisor)
                for member in members:
                    self._join(member)
                self._outbox.send(SUPERVISOR, ClientStarted(self._client_id))
            case Joined():
                self._join(message)
            case Left(EngineId() as engine, cause):
                self._leave(engine, cause)
            case Left():
                pass  # other clients are no concern of this one
            case Stop(grace):
                self.grace = grace
                self.stopping.set()

    def _join(self, joined: Joined) -> None:
        if isinstance(joined.member, EngineId) and joined.engine is not None:
            self._outbox.connect(joined.member, joined.address)
            self._engines[joined.member] = joined.engine
            self._lost = None
            self._engines_changed.set()

    def _leave(self, engine: EngineId, cause: str) -> None:
        """Its requests have lost it. It may not have joined: then it failed while it started."""
        self._engines.pop(engine, None)
        self._stats.pop(engine, None)
        self._outbox.disconnect(engine)
        message = f"{engine.label} ended: {cause}"
        if not self._engines:
            self._lost = EngineFailed(message)
        self._engines_changed.set()
        for request in self._in_flight:
            if request.engine == engine:
                self._in_flight.fail(request, EngineFailed(message))
        self._worker_calls.fail(EngineFailed(message), engine=engine)

    def _tell_abort(self, request: Request) -> None:
        self._outbox.send(request.engine, Abort(self._client_id, sorted(request.running)))
