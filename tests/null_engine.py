"""An engine without a model: it takes the path of every engine, and invents its tokens."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagleray.identity import SUPERVISOR, ClientId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach, EngineSpec, EngineStarted, Stop
from eagleray.messages.membership import EngineInfo, Joined, Left
from eagleray.messages.outputs import Chunk, Chunks, FinishReason
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.wires import ENGINE_INBOX, ENGINE_OUTBOX
from eagleray.process.parent import Parent
from eagleray.transport.heartbeat import HeartbeatSender
from eagleray.transport.inbox import Inbox, Outbox

INFO = EngineInfo(architecture="Null", vocab_size=300, max_model_len=100_000, block_size=16, num_kv_blocks=10_000)

SECONDS = 60.0
TOKEN_SECONDS = 0.001


def token(prompt: list[int], position: int) -> int:
    """Return a token that depends on the prompt and the position alone, as a greedy model's does."""
    return 100 + (sum(prompt) + position * position) % 100


def run(payload: bytes, parent: Parent) -> None:
    spec = msgspec.msgpack.decode(payload, type=EngineSpec)
    with ExitStack() as stack:
        inbox = Inbox(Path(spec.runtime_dir), spec.engine.label, Codec(ENGINE_INBOX).decode, host=spec.host)
        stack.callback(inbox.close)
        outbox = Outbox(Codec(ENGINE_OUTBOX).encode)
        stack.callback(outbox.close)
        parent.report_bound(inbox.address)
        attach = inbox.receive(SECONDS)
        assert isinstance(attach, Attach)
        assert attach.member == spec.engine
        stack.callback(HeartbeatSender.start(attach.heartbeat, on_silent=lambda seconds: os._exit(1)).close)
        outbox.connect(SUPERVISOR, attach.supervisor)
        engine = NullEngine(spec, inbox, outbox)
        for joined in attach.members:
            engine.handle(joined)
        outbox.send(SUPERVISOR, EngineStarted(spec.engine, INFO))
        engine.serve()


class NullEngine:
    def __init__(self, spec: EngineSpec, inbox: Inbox, outbox: Outbox) -> None:
        self._id = spec.engine
        self._inbox = inbox
        self._outbox = outbox
        self._running: dict[tuple[ClientId, str], tuple[Generate, int]] = {}
        self._strangers: dict[ClientId, list[Generate]] = defaultdict(list)
        self._is_stopping = False

    def serve(self) -> None:
        while not self._is_stopping:
            message = self._inbox.receive(TOKEN_SECONDS if self._running else 1.0)
            while message is not None:
                self.handle(message)
                message = self._inbox.receive(0)
            self._step()

    def handle(self, message: object) -> None:
        match message:
            case Joined(ClientId() as client, address):
                self._outbox.connect(client, address)
                for request in self._strangers.pop(client, []):
                    self.handle(request)
            case Left(ClientId() as client):
                self._outbox.disconnect(client)
                self._running = {key: value for key, value in self._running.items() if key[0] != client}
            case Generate() if message.client not in self._outbox:
                self._strangers[message.client].append(message)
            case Generate():
                self._running[message.client, message.request_id] = message, len(message.output_token_ids)
            case Abort(client, request_ids):
                for request_id in request_ids:
                    self._running.pop((client, request_id), None)
            case Stop():
                self._is_stopping = True

    def _step(self) -> None:
        """Generate one token for each request."""
        for (client, request_id), (request, position) in list(self._running.items()):
            is_last = position + 1 >= request.stopping.max_tokens
            chunk = Chunk(
                request_id=request_id,
                token_ids=[token(request.prompt_token_ids, position)],
                finish_reason=FinishReason.LENGTH if is_last else None,
            )
            self._outbox.send(client, Chunks(self._id, [chunk]))
            if is_last:
                del self._running[client, request_id]
            else:
                self._running[client, request_id] = request, position + 1
        if self._running:
            time.sleep(TOKEN_SECONDS)
