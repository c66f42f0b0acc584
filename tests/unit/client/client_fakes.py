"""A network in memory, and an engine whose messages the test chooses.

Messages pass through the codecs of their wires, so a message that no wire could carry fails here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict

import msgspec
from client_tokenizers import load

from eagleray.client.checkpoint_fetcher import fetch_nothing
from eagleray.client.client import Client
from eagleray.client.preprocess import RequestBuilder
from eagleray.client.request import ClientRequest
from eagleray.client.routing.router import Router
from eagleray.errors import ChannelClosed
from eagleray.identity import ClientId, EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach
from eagleray.messages.membership import EngineInfo, Joined, Left, RoutingInfo
from eagleray.messages.outputs import Chunk, Chunks
from eagleray.messages.requests import Abort, CallWorkers, Generate
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.scaling import Drained
from eagleray.messages.wires import CLIENT_INBOX, CLIENT_OUTBOX

CLIENT = ClientId("test", 0)
INFO = EngineInfo(
    architecture="Tiny",
    vocab_size=500,
    max_model_len=64,
    block_size=4,
    num_kv_blocks=100,
    has_experts=True,
    routing=RoutingInfo(num_layers=2, num_experts=300, top_k=2),
)


def make_request(*, prompt=(5, 6, 7), tokenizer=None, routing=None, max_restarts=3, **params):
    """Return a request with these sampling parameters that has not been sent."""
    builder = RequestBuilder(CLIENT, tokenizer=tokenizer, eos_token_ids=(), max_logprobs=20)
    params = SamplingParams(**params)
    info = msgspec.structs.replace(INFO, max_model_len=10_000, routing=routing or INFO.routing)
    messages = builder.make_messages(list(prompt), params, info, request_id="x", seed=1)
    return ClientRequest("x", messages, params, tokenizer=tokenizer, routing=routing, max_restarts=max_restarts)


def deliver(request, index, chunk):
    request.deliver(request.completions[index], chunk)


class Network:
    """The messages that were sent, by the receiver's address."""

    def __init__(self):
        self.mail = defaultdict(list)


class MemoryInbox:
    def __init__(self, address="client"):
        self.address = address
        self._queue = asyncio.Queue()
        self._codec = Codec(CLIENT_INBOX)

    def put(self, message):
        self.put_frames(Codec(CLIENT_INBOX).encode(message))

    def put_frames(self, frames):
        self._queue.put_nowait(frames)

    async def receive(self):
        frames = await self._queue.get()
        if frames is None:
            raise ChannelClosed("closed")
        return self._codec.decode(frames)

    def close(self):
        self._queue.put_nowait(None)


class MemoryOutbox:
    def __init__(self, network):
        self._network = network
        self._addresses = {}
        self._codec = Codec(CLIENT_OUTBOX)
        self.is_closed = False
        self.broken = []
        self.refuses = False
        """Whether `send` fails."""

    def connect(self, peer, address):
        self._addresses[peer] = address

    def disconnect(self, peer):
        self._addresses.pop(peer, None)

    def pop_broken(self):
        broken, self.broken = self.broken, []
        return broken

    def send(self, peer, message):
        if self.refuses:
            raise TypeError("this cannot be part of a message")
        decoded = self._codec.decode(self._codec.encode(message))
        if peer in self._addresses:
            self._network.mail[self._addresses[peer]].append(decoded)

    def close(self):
        self.is_closed = True


class FakeEngine:
    """Receives requests, and sends only the chunks that a test chooses."""

    def __init__(self, setup, rank=0, info=INFO, incarnation=0):
        self.id = EngineId("test", rank, incarnation)
        self.info = info
        self._setup = setup
        self._num_received = 0
        self.aborted = []
        self.request_ids = []
        """Ids of the requests that it received, in order."""
        self.requests = {}
        self.calls = []
        """Calls of the worker extension that it received, in order."""

    @property
    def address(self):
        return self.id.label

    def joined_message(self):
        return Joined(self.id, self.address, self.info)

    def receive(self):
        """Sort the messages that were sent to it."""
        mail = self._setup.network.mail[self.address]
        for message in mail[self._num_received :]:
            match message:
                case Generate():
                    self.request_ids.append(message.request_id)
                    self.requests[message.request_id] = message
                case Abort(client, request_ids):
                    assert client == CLIENT
                    self.aborted += request_ids
                case CallWorkers():
                    self.calls.append(message)
        self._num_received = len(mail)
        return self

    async def send(self, *chunks):
        """Send chunks of one step, each given as (number of the request, fields of its `Chunk`)."""
        self.receive()
        made = [Chunk(request_id=self.request_ids[number], **fields) for number, fields in chunks]
        await self._setup.deliver(Chunks(self.id, made))

    async def join(self):
        await self._setup.deliver(self.joined_message())
        return self

    async def leave(self, cause="killed by SIGKILL", returns=True, is_planned=False):
        await self._setup.deliver(Left(self.id, cause, returns, is_planned=is_planned))


class Setup:
    """A client with its mailboxes and one engine, and the task that runs it."""

    def __init__(
        self,
        *,
        kind="byte_level",
        seed=None,
        eos_token_ids=(2,),
        max_request_restarts=3,
        ranks=(),
        reports_load=False,
        prepare_checkpoint=fetch_nothing,
        **options,
    ):
        self.network = Network()
        self.inbox = MemoryInbox()
        self.outbox = MemoryOutbox(self.network)
        self.tokenizer = None if kind is None else load(kind)
        builder = RequestBuilder(
            CLIENT,
            tokenizer=self.tokenizer,
            eos_token_ids=eos_token_ids,
            max_logprobs=20,
            seed=seed,
            max_request_restarts=max_request_restarts,
            **options,
        )
        router = Router(rng=random.Random(1), ranks=ranks)
        self.client = Client(
            CLIENT,
            inbox=self.inbox,
            outbox=self.outbox,
            builder=builder,
            router=router,
            reports_load=reports_load,
            prepare_checkpoint=prepare_checkpoint,
        )
        self.engine = FakeEngine(self)
        self.running = asyncio.create_task(self.client.run())

    async def deliver(self, *messages):
        """Put messages into the client's inbox, and let the client handle them."""
        for message in messages:
            self.inbox.put(message)
        for _ in range(3):
            await asyncio.sleep(0)

    @property
    def drained(self):
        """Engines that the client has reported as drained."""
        return [message.engine for message in self.network.mail["supervisor"] if isinstance(message, Drained)]

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def asynchronous(test):
    """Run the test in an event loop, in bounded time."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


async def start_task(coroutine):
    """Return the coroutine as a task, after it has run as far as it can."""
    task = asyncio.create_task(coroutine)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


@contextlib.asynccontextmanager
async def attached(**options):
    """Yield a setup whose client is attached to a fleet of one engine."""
    setup = Setup(**options)
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined_message()]))
    try:
        yield setup
    finally:
        await setup.client.close()
        await asyncio.wait_for(setup.running, 5)
