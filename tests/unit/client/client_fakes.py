"""A network in memory, and an engine that says what the test tells it to.

Messages go through the codecs of their wires, so what could not travel fails here too.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict

import msgspec
from client_tokenizers import load

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
    """A request of the client with these sampling parameters, not sent yet."""
    builder = RequestBuilder(CLIENT, tokenizer=tokenizer, eos_token_ids=(), max_logprobs=20)
    params = SamplingParams(**params)
    info = msgspec.structs.replace(INFO, max_model_len=10_000, routing=routing or INFO.routing)
    messages = builder.make_messages(list(prompt), params, info, request_id="x", seed=1)
    return ClientRequest("x", messages, params, tokenizer=tokenizer, routing=routing, max_restarts=max_restarts)


def deliver(request, index, chunk):
    request.deliver(request.completions[index], chunk)


class Network:
    """What was sent, by the receiver's address."""

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
        """Whether nothing can be sent."""

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
    """Takes requests and answers nothing by itself."""

    def __init__(self, setup, rank=0, info=INFO, incarnation=0):
        self.id = EngineId("test", rank, incarnation)
        self.info = info
        self._setup = setup
        self._num_read = 0
        self.aborted = []
        self.names = []
        """Of the requests it was sent, in order."""
        self.requests = {}
        self.calls = []
        """Of the worker extension, in order."""

    @property
    def address(self):
        return self.id.label

    def joined(self):
        return Joined(self.id, self.address, self.info)

    def read(self):
        """Take what was sent."""
        mail = self._setup.network.mail[self.address]
        for message in mail[self._num_read :]:
            match message:
                case Generate():
                    self.names.append(message.request_id)
                    self.requests[message.request_id] = message
                case Abort(client, request_ids):
                    assert client == CLIENT
                    self.aborted += request_ids
                case CallWorkers():
                    self.calls.append(message)
        self._num_read = len(mail)
        return self

    async def say(self, *chunks):
        """`chunks`: (number of the request, fields of its `Chunk`)."""
        self.read()
        made = [Chunk(request_id=self.names[number], **fields) for number, fields in chunks]
        await self._setup.deliver(Chunks(self.id, made))

    async def join(self):
        await self._setup.deliver(self.joined())
        return self

    async def leave(self, cause="killed by SIGKILL", returns=True):
        await self._setup.deliver(Left(self.id, cause, returns))


class Setup:
    """A client with its mailboxes and one engine, and the task that runs it."""

    def __init__(
        self, *, kind="byte_level", seed=None, eos_token_ids=(2,), max_request_restarts=3, ranks=(), **options
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
        self.client = Client(CLIENT, inbox=self.inbox, outbox=self.outbox, builder=builder, router=router)
        self.engine = FakeEngine(self)
        self.running = asyncio.create_task(self.client.run())

    async def deliver(self, *messages):
        """And let the client handle them."""
        for message in messages:
            self.inbox.put(message)
        for _ in range(3):
            await asyncio.sleep(0)

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False)


def asynchronous(test):
    """Run the test in an event loop, in bounded time."""

    def run():
        asyncio.run(asyncio.wait_for(test(), 10))

    run.__name__ = test.__name__
    return run


async def started(coroutine):
    """The coroutine as a task that has got as far as it can."""
    task = asyncio.create_task(coroutine)
    for _ in range(3):
        await asyncio.sleep(0)
    return task


@contextlib.asynccontextmanager
async def attached(**options):
    """A setup whose client has joined a fleet of one engine."""
    setup = Setup(**options)
    await setup.deliver(Attach(CLIENT, "supervisor", [setup.engine.joined()]))
    try:
        yield setup
    finally:
        await setup.client.close()
        await asyncio.wait_for(setup.running, 5)
