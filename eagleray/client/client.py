"""The client of the engines, and the only one: the API server and `LLM` both use it.

Owns its inbox and outbox, the tokenizer, and every request from `generate` to its end; `dispatch` brings requests to
engines, and on to others when an engine ends. Whoever made it runs `run` in a task and closes it with `close`.
Everything happens in one event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from eagleray.client.collective_rpc import RpcCalls
from eagleray.client.dispatch import Dispatch
from eagleray.client.intake import RequestBuilder
from eagleray.client.mailboxes import Inbox, Outbox
from eagleray.client.preprocess import Preprocessor, Prompt
from eagleray.client.recovery import RecoveryObserver
from eagleray.client.routing.router import Router
from eagleray.client.stream import RequestStream
from eagleray.client.supervision import Supervision
from eagleray.client.text.generation_config import eos_token_ids
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.config.resolve import checkpoint_dir, local_ranks, tokenizer_dir
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, DeadlineExceeded, EngineFailed, Unavailable
from eagleray.identity import ClientId, EngineId
from eagleray.log import get_logger
from eagleray.messages.lifecycle import Attach, ClientStarted, Knows, Stop, SupervisorToMember, Unreachable
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.outputs import Chunks, EngineStats, EngineToClient, ExpertLoad, WorkersReturned
from eagleray.messages.sampling import SamplingParams

logger = get_logger(__name__)

SUPERVISOR: Literal["supervisor"] = "supervisor"

WATCH_SECONDS = 1.0
"""Between looks at the connections."""


class Client:
    """Make one with `create`, inside the event loop that it is to live in."""

    def __init__(
        self, client_id: ClientId, *, inbox: Inbox, outbox: Outbox, intake: RequestBuilder, router: Router
    ) -> None:
        self.address = inbox.address
        self.stopping = asyncio.Event()
        """Set when the supervisor wants this client to end: nothing new is taken in then."""
        self.attached = asyncio.Event()
        """Set when it has been told which engines there are, and which are coming back."""
        self.grace = 0.0
        """Seconds that running requests get once `stopping` is set."""
        self._client_id = client_id
        self._inbox = inbox
        self._outbox = outbox
        self._intake = intake
        self._members = router.members
        self._members_changed = asyncio.Event()
        self._dispatch = Dispatch(client_id, router=router, send=outbox.send)
        self._router = router
        self._worker_calls = RpcCalls(client_id, send=outbox.send)
        self._supervision = Supervision(on_lost=self._lose_supervisor)
        self._failure: str | None = None
        """Why nothing will ever be done again, if that is so."""
        self._is_closed = False

    @classmethod
    def create(cls, client_id: ClientId, config: Config, *, inbox: Inbox, outbox: Outbox) -> Client:
        """Read the tokenizer and make a client with it.

        Raises `CheckpointError` or `ConfigError` if the tokenizer cannot be read.
        """
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
        intake = RequestBuilder(
            preprocessor,
            seed=model.seed,
            max_request_restarts=config.recovery.max_request_restarts,
            request_timeout=config.serving.request_timeout,
        )
        # Chance of its own in every client, whatever the seed: else all would choose the same engines.
        router = Router(
            rng=random.Random(), match_prefixes=config.cache.enable_prefix_caching, ranks=local_ranks(config)
        )
        return cls(client_id, inbox=inbox, outbox=outbox, intake=intake, router=router)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None under `skip_tokenizer_init`."""
        return self._intake.preprocessor.tokenizer

    @property
    def engines(self) -> Mapping[EngineId, EngineInfo]:
        """The engines that are there."""
        return self._members.engines

    @property
    def stats(self) -> Mapping[EngineId, EngineStats]:
        """The newest report of each engine that is there, and has sent one."""
        return self._members.stats

    @property
    def expert_load(self) -> Mapping[EngineId, ExpertLoad]:
        """The newest report of each engine that is there of how much its experts had to do."""
        return self._members.expert_load

    @property
    def engine_info(self) -> EngineInfo | None:
        """What is served, also while the engines that served it are coming back; None if nothing is."""
        return self._members.info

    @property
    def expects_engines(self) -> bool:
        """Whether an engine is starting, for the first time or again."""
        return self._failure is None and self._members.expects_engines

    @property
    def cause(self) -> str | None:
        """Why there is no engine, if the last one has left."""
        return self._failure or self._members.cause

    @property
    def observer(self) -> RecoveryObserver:
        """Is told how requests survive the ends of engines."""
        return self._dispatch.observer

    @observer.setter
    def observer(self, observer: RecoveryObserver) -> None:
        self._dispatch.observer = observer

    @property
    def num_in_flight(self) -> int:
        """Requests that have not ended, and calls of the worker extension, one for each engine."""
        return len(self._dispatch.in_flight) + len(self._worker_calls)

    @property
    def num_queued_seqs(self) -> int:
        """Sequences of requests in flight that have not got a token yet."""
        return self._dispatch.in_flight.num_queued_seqs

    async def run(self) -> None:
        """Read the inbox until `close`, or until the supervisor falls silent. Whatever else ends this raises.

        What is still in flight then fails.
        """
        watch = asyncio.create_task(self._watch_connections())
        try:
            while True:
                try:
                    message = await self._inbox.receive()
                except msgspec.MsgspecError as error:  # anybody who may enter the directory can write to the inbox
                    logger.warning("dropped what is no message to a client: %s", error)
                else:
                    self._handle(message)
        except (ChannelClosed, asyncio.CancelledError):  # closing an inbox cancels who waits for it
            if not (self._is_closed or self._supervision.is_lost):
                raise
        finally:
            watch.cancel()
            if not self._is_closed and self._failure is None:
                self._fail("this client no longer hears its engines")

    async def _watch_connections(self) -> None:
        """An engine that cannot be reached must not be waited for."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for peer in self._outbox.take_broken():
                if isinstance(peer, EngineId):
                    self._outbox.send(SUPERVISOR, Unreachable(self._client_id, peer))
                else:
                    self._supervision.lose("the connection to the supervisor broke")

    async def wait_until_ready(self, timeout: float) -> EngineInfo:
        """Wait for an engine, at most `timeout` seconds.

        Raises `EngineFailed` if one has left and none will come, `DeadlineExceeded` if none came.
        """
        try:
            async with asyncio.timeout(timeout):
                while not self.engines:
                    if self.cause is not None and not self.expects_engines:
                        raise EngineFailed(self.cause)
                    self._members_changed.clear()
                    await self._members_changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine was ready within {timeout:.0f} s") from None
        return next(iter(self.engines.values()))

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        session: str | None = None,
        rank: int | None = None,
    ) -> RequestStream:
        """Send a request to an engine; if that ends, another one goes on with it.

        `request_id`: unique among those in flight; by default one is made. `timeout`: seconds after which it fails with
        `DeadlineExceeded`; None: the server's own (`request_timeout`). Requests of one `session` go to the same engine
        as long as there is one. `rank`: the only engine that it may go to.

        Raises `InvalidRequest` for what cannot be done, `Unavailable` while no engine takes requests and none is coming
        back, and `EngineFailed` once the instance has failed.
        """
        request = self._intake.request(
            prompt,
            params,
            self._check_open(),
            self._dispatch.in_flight,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            timeout=timeout,
            session=session,
            rank=rank,
        )
        return self._dispatch.start(request)

    async def call_workers(
        self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *, timeout: float | None
    ) -> list[Any]:
        """Call a method of the worker extension on every worker of every engine.

        Returns what each returned: engine by engine, the workers of one in order of rank. Arguments and results: see
        `messages.plain`. `timeout`: seconds that the workers have, all together; None: ten minutes. When it is over the
        caller goes on, but the method does not end on the workers.

        Raises `InvalidRequest` for what cannot be called or sent, `RequestFailed` if the method raised on a rank,
        `EngineFailed` if an engine ended, `DeadlineExceeded`, and `Unavailable` while no engine takes requests.
        """
        self._check_open()
        if not self.engines:
            raise Unavailable(f"no engine is ready: {self.cause}")
        engines = sorted(self.engines, key=lambda engine: engine.rank)
        return await self._worker_calls.call(engines, method, args, kwargs, timeout=timeout)

    async def close(self) -> None:
        """Abort what runs, and end `run`. Harmless when repeated."""
        if self._is_closed:
            return
        self._is_closed = True
        self._supervision.close()
        self._worker_calls.fail(Unavailable("this client was closed before the workers had answered"))
        for request in self._dispatch.in_flight:
            self._dispatch.in_flight.abort(request)
        self._inbox.close()
        self._outbox.close()

    def _check_open(self) -> EngineInfo:
        """What is served. Raises if nothing is taken in."""
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._is_closed or self.stopping.is_set():
            raise Unavailable("this client is stopping and takes no new requests")
        if self._members.info is None:
            raise Unavailable(f"no engine is ready{f': {self.cause}' if self.cause else ', try again in a moment'}")
        return self._members.info

    def _handle(self, message: SupervisorToMember | EngineToClient) -> None:
        match message:
            case Chunks(engine, chunks):
                self._dispatch.deliver(engine, chunks)
            case EngineStats():
                self._router.report(message)
            case ExpertLoad():
                self._members.report(message)
            case WorkersReturned():
                self._worker_calls.deliver(message)
            case Attach(supervisor=supervisor, members=members, pulse=ticket, missing=missing):
                self._outbox.connect(SUPERVISOR, supervisor)
                for member in members:
                    self._join(member)
                for left in missing:
                    self._handle(left)
                self._supervision.start(ticket)
                self._outbox.send(SUPERVISOR, ClientStarted(self._client_id))
                self.attached.set()
            case Joined():
                self._join(message)
            case Left(EngineId() as engine, cause, returns, info):
                if info is not None:
                    self._members.remember(info)
                self._leave(engine, cause, returns)
            case Left():
                pass  # other clients are no concern of this one
            case Stop(grace, cause):
                self.grace = grace
                self.stopping.set()
                if cause:
                    self._fail(cause)

    def _join(self, joined: Joined) -> None:
        if isinstance(joined.member, EngineId) and joined.engine is not None and joined.member not in self.engines:
            self._outbox.connect(joined.member, joined.address)
            self._dispatch.join(joined.member, joined.engine)
            self._outbox.send(SUPERVISOR, Knows(self._client_id, joined.member))
            self._members_changed.set()

    def _leave(self, engine: EngineId, cause: str, returns: bool) -> None:
        self._outbox.disconnect(engine)
        self._dispatch.leave(engine, cause=cause, returns=returns)
        self._worker_calls.fail(EngineFailed(f"{engine.label} ended: {cause}"), engine=engine)
        self._members_changed.set()

    def _fail(self, cause: str) -> None:
        """Everything fails now, and whatever is asked for later."""
        self._failure = cause
        self._dispatch.fail(cause)
        self._worker_calls.fail(EngineFailed(cause))
        self._members_changed.set()

    def _lose_supervisor(self, cause: str) -> None:
        self._fail(cause)
        logger.error("%s: this client ends", self._failure)
        self._inbox.close()
