"""The client of the engines, used by the API server and by `LLM`.

Owns its inbox and outbox, the tokenizer, and every request from `generate` to its end. Whoever opens it runs `run` in a
task and closes it with `close`. Everything happens in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import msgspec

from eagleray.client.answers.choose import choose_formats
from eagleray.client.answers.plan import AnswerFormats
from eagleray.client.answers.reasoning_formats import reasoning_config
from eagleray.client.checkpoint_fetcher import CheckpointFetcher, PrepareCheckpoint, fetch_nothing
from eagleray.client.collective_rpc import RpcCalls
from eagleray.client.control import ControlCalls, execute
from eagleray.client.in_flight import InFlightRequests, RecoveryObserver
from eagleray.client.load_report import LoadReporter
from eagleray.client.preprocess import Prompt, RequestBuilder, RequestOptions
from eagleray.client.request import RequestStream
from eagleray.client.request_log import RequestLog
from eagleray.client.routing.router import Router
from eagleray.client.text.generation_config import model_eos_token_ids
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.client.thinking import ThinkingBuilder
from eagleray.client.tracing import open_tracer
from eagleray.config.resolve import local_ranks
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed, DeadlineExceeded, EngineFailed, Unavailable
from eagleray.hub.locate import tokenizer_dir
from eagleray.identity import SUPERVISOR, ClientId, EngineId, MemberId, SupervisorId
from eagleray.log import get_logger
from eagleray.messages.adapters import Adapter
from eagleray.messages.checkpoints import FetchCheckpoint
from eagleray.messages.codec import Codec
from eagleray.messages.control import Command, ControlRequest, ControlReturned, InstanceState, SetState, StateChanged
from eagleray.messages.lifecycle import (
    Attach,
    ClientStarted,
    Knows,
    MemberToSupervisor,
    Stop,
    SupervisorToClient,
    Unreachable,
)
from eagleray.messages.member_history import MemberHistory
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.outputs import Chunks, EngineStats, EngineToClient, ExpertLoad, WorkersReturned
from eagleray.messages.requests import ClientToEngine
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.scaling import Drained, Draining, FleetRequest
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import AsyncInbox, Outbox

logger = get_logger(__name__)

CONNECTION_POLL_SECONDS = 1.0

ClientInbox = AsyncInbox[SupervisorToClient | EngineToClient]
ClientOutbox = Outbox[MemberId | SupervisorId, ClientToEngine | MemberToSupervisor]


class Client:
    """A client of one instance. Open it with `open`, inside the event loop in which it runs."""

    def __init__(
        self,
        client_id: ClientId,
        *,
        inbox: ClientInbox,
        outbox: ClientOutbox,
        builder: RequestBuilder,
        router: Router,
        request_log: RequestLog | None = None,
        reports_load: bool = False,
        target_ttft: float | None = None,
        answer_formats: AnswerFormats = AnswerFormats(),  # noqa: B008 - immutable
        prepare_checkpoint: PrepareCheckpoint = fetch_nothing,
    ) -> None:
        self.address = inbox.address
        self.stopping = asyncio.Event()
        """Set when the supervisor stops this client: no request is accepted then."""
        self.attached = asyncio.Event()
        """Set when the supervisor has sent the list of engines that have joined, or are coming back."""
        self.grace = 0.0
        """Seconds for which running requests may continue once `stopping` is set."""
        self.others_stay = False
        """Whether other API servers serve on once `stopping` is set. Then requests that still come are taken."""
        self.state = InstanceState()
        """State of the instance. Requests can be sent in every state; engines run them while it `may_step`."""
        self.tokenizer = builder.tokenizer
        """The model's tokenizer, or None under `skip_tokenizer_init`."""
        self.answer_formats = answer_formats
        """Formats in which the model writes its answers."""
        self.engines: Mapping[EngineId, EngineInfo] = router.known_engines.engines
        """The engines that have joined."""
        self.stats: Mapping[EngineId, EngineStats] = router.known_engines.stats
        """The latest statistics of each engine that has joined and sent some."""
        self.expert_load: Mapping[EngineId, ExpertLoad] = router.known_engines.expert_load
        """The latest load of the experts of each engine that has joined and sent one."""
        self.history = MemberHistory()
        """Changes of the membership, as every client of the instance sees them."""
        self.client_id = client_id
        self._inbox = inbox
        self._outbox = outbox
        self._builder = builder
        self._router = router
        self._request_log = request_log
        self._known_engines = router.known_engines
        self._engines_changed = asyncio.Event()
        self._on_change: Callable[[], None] = lambda: None
        self._in_flight = InFlightRequests(client_id, router=router, send=outbox.send)
        self._in_flight.on_drained = self._report_drained
        self._load_reporter: LoadReporter | None = None
        """None unless the number of engines follows the load."""
        if reports_load:
            self._load_reporter = LoadReporter(client_id, in_flight=self._in_flight, target_ttft=target_ttft)
        self._rpc_calls = RpcCalls(client_id, send=outbox.send)
        self._rpc_calls.on_done = self._on_calls_done
        self._control_calls = ControlCalls(client_id, send=partial(outbox.send, SUPERVISOR))
        self._checkpoint_fetcher = CheckpointFetcher(
            client_id, prepare=prepare_checkpoint, send=partial(outbox.send, SUPERVISOR)
        )
        self._heartbeat: HeartbeatSender | None = None
        self._failure: str | None = None
        """Cause with which this client fails every request, now and later; None while it works."""
        self._has_lost_supervisor = False
        self._is_closed = False

    @classmethod
    def open(
        cls,
        client_id: ClientId,
        config: Config,
        runtime_dir: Path,
        *,
        prepare_checkpoint: PrepareCheckpoint = fetch_nothing,
        host: str | None = None,
    ) -> Client:
        """Open a client with a bound inbox, in the running event loop.

        `prepare_checkpoint` fetches another checkpoint for engines that are restarted. `host`: address of this host for
        engines of other hosts; None: all are on this host. Raises as `create` does.
        """
        inbox = ClientInbox(runtime_dir, client_id.label, Codec[Any](CLIENT_INBOX).decode, host=host)
        try:
            outbox = ClientOutbox(Codec[Any](CLIENT_OUTBOX).encode)
            return cls.create(client_id, config, inbox=inbox, outbox=outbox, prepare_checkpoint=prepare_checkpoint)
        except BaseException:
            inbox.close()
            raise

    @classmethod
    def create(
        cls,
        client_id: ClientId,
        config: Config,
        *,
        inbox: ClientInbox,
        outbox: ClientOutbox,
        prepare_checkpoint: PrepareCheckpoint = fetch_nothing,
    ) -> Client:
        """Create a client with the model's tokenizer.

        Raises `CheckpointError` or `ConfigError` if the tokenizer cannot be read, or for an unknown format of answers.
        """
        model = config.model
        tokenizer = None
        if not model.skip_tokenizer_init:
            template = None if model.chat_template is None else Path(model.chat_template).expanduser()
            tokenizer = Tokenizer.load(
                tokenizer_dir(model), chat_template=template, content_format=model.chat_template_content_format
            )
        formats = choose_formats(model, "" if tokenizer is None else tokenizer.chat_template)
        eos = model_eos_token_ids(model) or (tokenizer.eos_token_ids if tokenizer else ())
        builder = RequestBuilder(
            client_id,
            tokenizer=tokenizer,
            eos_token_ids=eos,
            max_logprobs=model.max_logprobs,
            thinking=None
            if tokenizer is None or formats.reasoning is None
            else ThinkingBuilder(formats.reasoning, tokenizer, eos, reasoning_config(model)),
            make_grammar=partial(
                StructuredOutputsParams.to_grammar,
                default_whitespace=model.structured_outputs_whitespace,
                disable_additional_properties=model.structured_outputs_disable_additional_properties,
            ),
            seed=model.seed,
            max_request_restarts=config.recovery.max_request_restarts,
            request_timeout=config.serving.request_timeout,
            stream_interval=config.serving.stream_interval,
            tracer=open_tracer(config, client_id),
        )
        # Not seeded: with equal seeds all clients would choose the same engines.
        router = Router(
            rng=random.Random(), match_prefixes=config.cache.enable_prefix_caching, ranks=local_ranks(config)
        )
        request_log = RequestLog.open(config.observability)
        return cls(
            client_id,
            inbox=inbox,
            outbox=outbox,
            builder=builder,
            router=router,
            request_log=request_log,
            reports_load=config.parallel.autoscale is not None,
            target_ttft=config.parallel.autoscale_target_ttft,
            answer_formats=formats,
            prepare_checkpoint=prepare_checkpoint,
        )

    @property
    def takes_no_requests(self) -> bool:
        """Whether new requests are refused, because this client stops."""
        return self.stopping.is_set() and not self.others_stay

    @property
    def engine_info(self) -> EngineInfo | None:
        """The served model, also while its engines are starting again; None if nothing is served."""
        return self._known_engines.info

    @property
    def expects_engines(self) -> bool:
        """Whether an engine is starting, for the first time or again."""
        return self._failure is None and self._known_engines.expects_engines

    @property
    def ranks(self) -> list[int]:
        """The data-parallel ranks of the deployment, in order, whether their engines are present or not."""
        return self._known_engines.deployed_ranks

    @property
    def cause(self) -> str | None:
        """Cause of the last exit of an engine, if no engine is left."""
        return self._failure or self._known_engines.cause

    def observe_recovery(self, observer: RecoveryObserver) -> None:
        """Report restarts of requests to `observer`."""
        self._in_flight.observer = observer

    def observe_instance(self, on_change: Callable[[], None]) -> None:
        """Call `on_change` after each change of the membership or of the instance's state, and when this client is
        stopped."""
        self._on_change = on_change

    @property
    def num_requests(self) -> int:
        """Number of requests that have not finished."""
        return len(self._in_flight)

    @property
    def num_in_flight(self) -> int:
        """Number of requests and of other calls that have not finished. A call of the worker extension counts once for
        each engine."""
        return self.num_requests + len(self._rpc_calls) + len(self._control_calls)

    @property
    def num_queued_seqs(self) -> int:
        """Number of sequences of requests in flight that have no token yet."""
        return self._in_flight.num_queued_seqs

    async def run(self) -> None:
        """Handle messages until `close`, or until the supervisor is lost.

        Raises the error that ends it otherwise; then the requests in flight fail.
        """
        watch = asyncio.create_task(self._watch())
        try:
            while True:
                try:
                    message = await self._inbox.receive()
                except msgspec.MsgspecError as error:  # any process that may enter the directory can write to the inbox
                    logger.warning("dropped an invalid message: %s", error)
                else:
                    self._handle(message)
        except (ChannelClosed, asyncio.CancelledError):  # closing an inbox cancels a pending `receive`
            if not (self._is_closed or self._has_lost_supervisor):
                raise
        finally:
            watch.cancel()
            if not self._is_closed and self._failure is None:
                self._fail("this client no longer hears its engines")

    async def _watch(self) -> None:
        """Report engines that cannot be reached to the supervisor, which then removes them, and the load."""
        while True:
            await asyncio.sleep(CONNECTION_POLL_SECONDS)
            if self._load_reporter is not None and self.attached.is_set():
                self._outbox.send(SUPERVISOR, self._load_reporter.report(self.stats.values()))
            for peer in self._outbox.pop_broken():
                if isinstance(peer, EngineId):
                    self._outbox.send(SUPERVISOR, Unreachable(self.client_id, peer))
                else:
                    self._on_supervisor_lost("the connection to the supervisor broke")

    async def wait_until_ready(self, timeout: float) -> EngineInfo:
        """Wait for an engine, at most `timeout` seconds.

        Raises `EngineFailed` if one has left and none will come, `DeadlineExceeded` if none came.
        """
        try:
            async with asyncio.timeout(timeout):
                while not self.engines:
                    if self.cause is not None and not self.expects_engines:
                        raise EngineFailed(self.cause)
                    self._engines_changed.clear()
                    await self._engines_changed.wait()
        except TimeoutError:
            raise DeadlineExceeded(f"no engine was ready within {timeout:.0f} s") from None
        return next(iter(self.engines.values()))

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt that could be generated from. Raises as `generate`."""
        return self._builder.tokenize(prompt, self._check_open())

    def generate(self, prompt: Prompt, params: SamplingParams, **options: Unpack[RequestOptions]) -> RequestStream:
        """Send a request to an engine; if the engine exits, another one continues the request.

        Raises `InvalidRequest` for a request that is impossible, `Unavailable` while no engine accepts requests and
        none is coming back, and `EngineFailed` once the instance has failed.
        """
        return self._send(prompt, params, options)

    def pool(self, prompt: Prompt, **options: Unpack[RequestOptions]) -> RequestStream:
        """Send a request to a pooling model, see `RequestStream.pooled`. Raises as `generate`."""
        return self._send(prompt, None, options)

    def find_adapter(self, name: str) -> Adapter | None:
        """Return the low-rank adapter of this name, if the instance has one."""
        return next((adapter for adapter in self.state.adapters if adapter.name == name), None)

    async def call_workers(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        timeout: float | None,
        as_torch: bool = True,
    ) -> list[Any]:
        """Call a method of the worker extension, or a built-in one, on every worker of every engine.

        Returns the results by engine, then by rank of the worker. Arguments and results: see `messages.plain`.
        `timeout`: seconds for all workers together; None: ten minutes. After the timeout the caller continues, but the
        method does not end on the workers. `as_torch`: whether tensors in the results become torch's, see there.

        Raises `InvalidRequest` for a call that is impossible or cannot be sent, `RequestFailed` if the method raised on
        a rank, `EngineFailed` if an engine exited, `DeadlineExceeded`, and `Unavailable` while no engine accepts
        requests.
        """
        self._check_open()
        if not self.engines:
            raise Unavailable(f"no engine is ready: {self.cause}")
        engines = sorted(self.engines, key=lambda engine: engine.rank)
        return await self._rpc_calls.call(engines, method, args, kwargs, timeout=timeout, as_torch=as_torch)

    async def control(
        self, request: ControlRequest | FleetRequest, *, timeout: float | None = None, operation_id: str | None = None
    ) -> dict[str, Any]:
        """Have the instance execute a control call, such as `Pause`, on all its engines, and return the answer.

        `timeout`: seconds, ten minutes by default. After it, or if the caller is cancelled, the call is still executed.
        `operation_id`: calls with the same id that ask for the same are one call; by default one is made.

        Raises `WrongState` for a call that the state of the instance forbids, `NotFound`, `WeightsMismatch` and other
        `UserError`s, `EnginesMissing`, `TransferBroken`, `DeadlineExceeded` with the members that it waited for,
        and `Unavailable` before the client is attached.
        """
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._is_closed or not self.attached.is_set():
            raise Unavailable("this client is not attached to an instance, or was closed")
        return await self._control_calls.call(request, timeout=timeout, operation_id=operation_id)

    async def close(self) -> None:
        """Abort all requests, and end `run`. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._stop_heartbeat()
        self._rpc_calls.fail(Unavailable("this client was closed before the workers had answered"))
        self._control_calls.fail(Unavailable("this client was closed before the supervisor had answered"))
        self._in_flight.abort_all()
        self._inbox.close()
        self._outbox.close()
        if self._builder.tracer is not None:
            await self._builder.tracer.close()

    def _send(self, prompt: Prompt, params: SamplingParams | None, options: RequestOptions) -> RequestStream:
        request = self._builder.build(prompt, params, self._check_open(), ids_in_use=self._in_flight, **options)
        stream = self._in_flight.start(request)
        if self._request_log is not None:
            self._request_log.begin(request, params, options)
        return stream

    def _check_open(self) -> EngineInfo:
        """Return the served model, or raise if no requests are accepted."""
        if self._failure is not None:
            raise EngineFailed(self._failure)
        if self._is_closed or self.takes_no_requests:
            raise Unavailable("this client is stopping and takes no new requests")
        if self._known_engines.info is None:
            raise Unavailable(f"no engine is ready{f': {self.cause}' if self.cause else ', try again in a moment'}")
        return self._known_engines.info

    def _handle(self, message: SupervisorToClient | EngineToClient) -> None:
        match message:
            case Chunks():
                self._in_flight.deliver(message)
            case EngineStats():
                self._router.record_stats(message)
            case ExpertLoad():
                self._known_engines.record_report(message)
            case WorkersReturned():
                self._rpc_calls.deliver(message)
            case _:
                self._handle_supervisor(message)
                self._on_change()

    def _handle_supervisor(self, message: SupervisorToClient) -> None:
        match message:
            case ControlReturned():
                self._control_calls.deliver(message)
            case Command():
                if isinstance(message.body, SetState):
                    self.state = message.body.state
                self._outbox.send(SUPERVISOR, execute(message, self.client_id, self._in_flight))
            case StateChanged(state):
                self.state = state
            case Attach():
                self._on_attached(message)
            case Joined():
                self.history.record(message)
                self._on_joined(message)
            case Left():
                self.history.record(message)
                self._on_left(message)
            case Draining(engine):
                self._in_flight.drain(engine)
                self._report_drained(engine)
            case FetchCheckpoint():
                self._checkpoint_fetcher.begin(message)
            case Stop(grace, cause, others_stay):
                self.grace, self.others_stay = grace, others_stay
                self.stopping.set()
                if cause:
                    self._fail(cause)

    def _on_attached(self, attach: Attach) -> None:
        self.state = attach.state
        self._outbox.connect(SUPERVISOR, attach.supervisor)
        for member in attach.members:
            self._on_joined(member)
        for left in attach.missing:
            self._on_left(left)
        self.history = MemberHistory(attach.history)
        self._start_heartbeat(attach.heartbeat)
        self._outbox.send(SUPERVISOR, ClientStarted(self.client_id))
        self.history.record(Joined(self.client_id, "", time=time.time()))  # the `Joined` is sent to the others only
        self.attached.set()

    def _on_joined(self, joined: Joined) -> None:
        if isinstance(joined.member, EngineId) and joined.engine is not None and joined.member not in self.engines:
            self._outbox.connect(joined.member, joined.address)
            self._in_flight.on_engine_joined(joined.member, joined.engine)
            self._outbox.send(SUPERVISOR, Knows(self.client_id, joined.member))
            if self._load_reporter is not None:
                self._load_reporter.on_engine_joined()
            self._engines_changed.set()

    def _on_left(self, left: Left) -> None:
        if not isinstance(left.member, EngineId):
            return
        engine, cause = left.member, left.cause
        if left.engine is not None:
            self._known_engines.set_absent_info(left.engine)
        self._outbox.disconnect(engine)
        self._in_flight.on_engine_left(engine, cause=cause, will_restart=left.returns, is_planned=left.is_planned)
        verb = "left" if left.is_planned else "ended"
        self._rpc_calls.fail(EngineFailed(f"{engine.label} {verb}: {cause}"), engine=engine)
        self._engines_changed.set()

    def _report_drained(self, engine: EngineId) -> None:
        """Report to the supervisor that nothing of this client runs on an engine that drains, if so."""
        if not (self._is_closed or self._in_flight.are_on(engine) or self._rpc_calls.are_on(engine)):
            self._outbox.send(SUPERVISOR, Drained(self.client_id, engine))

    def _on_calls_done(self, engines: Sequence[EngineId]) -> None:
        for engine in engines:
            if self._router.is_drained(engine):
                self._report_drained(engine)

    def _fail(self, cause: str) -> None:
        """Fail every request in flight, and every later one."""
        self._failure = cause
        self._in_flight.fail_all(cause)
        self._rpc_calls.fail(EngineFailed(cause))
        self._control_calls.fail(EngineFailed(cause))
        self._engines_changed.set()

    # The supervisor.

    def _start_heartbeat(self, handle: bytes) -> None:
        """Exchange heartbeats with the supervisor. An empty handle: it watches this process by other means."""
        if handle:
            loop = asyncio.get_running_loop()

            def on_silent(seconds: float) -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing is left to fail
                    loop.call_soon_threadsafe(self._on_supervisor_silent, seconds)

            self._stop_heartbeat()
            self._heartbeat = HeartbeatSender.start(handle, on_silent=on_silent)

    def _stop_heartbeat(self) -> None:
        if self._heartbeat is not None:
            self._heartbeat.close()
            self._heartbeat = None

    def _on_supervisor_silent(self, seconds: float) -> None:
        if self._heartbeat is not None:  # else this client was closed in the meantime
            self._on_supervisor_lost(f"the supervisor was not heard of for {seconds:.0f} s")

    def _on_supervisor_lost(self, cause: str) -> None:
        """Fail everything and end `run`. Only the first cause counts."""
        if not self._has_lost_supervisor:
            self._has_lost_supervisor = True
            self._fail(cause)
            logger.error("this client stops: %s", cause)
            self._inbox.close()
