"""The application with a real client and scripted engines, without processes and sockets.

Messages to the engines are kept, and the test decides which messages they send."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers

from eagleray.client.client import Client
from eagleray.config.build import build_config
from eagleray.config.pooling_spec import PoolingSpec
from eagleray.config.sections import Config
from eagleray.errors import ChannelClosed
from eagleray.identity import ClientId, EngineId
from eagleray.messages.control import ControlCall, ControlReturned
from eagleray.messages.lifecycle import Knows, Stop
from eagleray.messages.membership import EngineInfo, Joined, Left, RoutingInfo
from eagleray.messages.outputs import (
    Chunk,
    Chunks,
    EngineStats,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    WorkersReturned,
)
from eagleray.messages.requests import Abort, CallWorkers, Generate
from eagleray.metrics.ledger import Ledger
from eagleray.server.app import create_app

ENGINE = EngineId("test", 0)
SPEECH = "hello world 😀 again"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.name %}({{ message.name }}) {% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ mood }}{% endif %}"
)


def write_checkpoint(directory: Path) -> Path:
    """A directory with a byte-level tokenizer, a chat template, and sampling defaults."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(["hello world hello there again and again, and again"], trainer)
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    backend.save(str(directory / "tokenizer.json"))
    files = {
        "config": {"model_type": "qwen3", "eos_token_id": backend.token_to_id("<|endoftext|>")},
        "tokenizer_config": {"eos_token": "<|endoftext|>", "chat_template": TEMPLATE},
        "generation_config": {"eos_token_id": backend.token_to_id("<|endoftext|>"), "temperature": 0.5, "top_k": 7},
    }
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


class AnyFingerprint:
    """Equal to the fingerprint of every server."""

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, str) and re.fullmatch(r"eagleray-[0-9.]+(-[a-z]+[0-9]*)*-[0-9a-f]{8}", other) is not None
        )

    __hash__ = None  # type: ignore[assignment]


FINGERPRINT = AnyFingerprint()


class ScriptedEngine:
    """All engines, and both ends of the client's transport. Answers each request with the chunks of `script`."""

    address = "nowhere"

    def __init__(self) -> None:
        self.sent: list[Any] = []
        """Messages from the client, without those about membership."""
        self.receivers: list[Any] = []
        """Receiver of each of `sent`."""
        self.script: Callable[[Generate], Iterator[Chunk]] | None = None
        self.call_workers: Callable[[CallWorkers], WorkersReturned] | None = None
        """Answers calls of the worker extension. None: they are not answered."""
        self.control: Callable[[ControlCall], ControlReturned] | None = None
        """Answers control calls, in place of the supervisor. None: they are not answered."""
        self._inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._playing: set[asyncio.Task[None]] = set()

    @property
    def requests(self) -> list[Generate]:
        return [message for message in self.sent if isinstance(message, Generate)]

    @property
    def aborted(self) -> list[str]:
        return [name for message in self.sent if isinstance(message, Abort) for name in message.request_ids]

    async def receive(self) -> Any:
        message = await self._inbox.get()
        if message is None:
            raise ChannelClosed("closed")
        return message

    def close(self) -> None:
        self._inbox.put_nowait(None)

    def connect(self, peer: Any, address: str) -> None: ...

    def disconnect(self, peer: Any) -> None: ...

    def pop_broken(self) -> list[Any]:
        return []

    def send(self, peer: Any, message: Any) -> None:
        if isinstance(message, Knows):
            return
        self.sent.append(message)
        self.receivers.append(peer)
        if isinstance(message, Generate) and self.script is not None:
            task = asyncio.create_task(self._play(self.script(message), peer))
            self._playing.add(task)
            task.add_done_callback(self._playing.discard)
        if isinstance(message, CallWorkers) and self.call_workers is not None:
            self.deliver(self.call_workers(message))
        if isinstance(message, ControlCall) and self.control is not None:
            self.deliver(self.control(message))

    def deliver(self, *messages: Any, engine: EngineId = ENGINE) -> None:
        """Put messages into the client's inbox, all chunks as those of one step."""
        chunks = [message for message in messages if isinstance(message, Chunk)]
        for message in [Chunks(engine, chunks)] if chunks else messages:
            self._inbox.put_nowait(message)

    async def _play(self, chunks: Iterator[Chunk], engine: EngineId) -> None:
        for chunk in chunks:
            self.deliver(chunk, engine=engine)
            await settle()


async def settle() -> None:
    """Let the event loop run until everything is done that needs no input."""
    for _ in range(20):
        await asyncio.sleep(0)


def logprobs_of(token_id: int, k: int, asked: Sequence[int] = ()) -> TokenLogprobs:
    """Return log-probabilities in which the chosen token is the second likeliest, and the `asked` ones are unlikely."""
    likeliest = [token_id + 1, token_id, *range(token_id + 2, token_id + 9)][:k]
    logprobs = [-1.5, *(-1.0 - 0.5 * place for place in range(k)), *[-20.0] * len(asked)]
    return TokenLogprobs([token_id, *likeliest, *asked], logprobs, 2)


def prompt_logprobs_of(prompt: list[int], k: int) -> PromptLogprobs:
    rows = [logprobs_of(token_id, k) for token_id in prompt[1:]]
    return PromptLogprobs(
        start=1,
        token_ids=np.array([row.token_ids for row in rows], np.int32).reshape(-1, 1 + k),
        logprobs=np.array([row.logprobs for row in rows], np.float32).reshape(-1, 1 + k),
        ranks=np.array([row.rank for row in rows], np.int32),
    )


class Api:
    """The application with blocking methods, which run its event loop."""

    def __init__(self, config: Config, runner: asyncio.Runner, ledger: Ledger) -> None:
        self.config = config
        self.engine = ScriptedEngine()
        self.ledger = ledger
        self._runner = runner
        self._reading: asyncio.Task[None] | None = None
        self.run(self._start())

    async def _start(self) -> None:
        self.client = Client.create(
            ClientId("test", 0),
            self.config,
            inbox=self.engine,
            outbox=self.engine,
        )
        self.app = create_app(self.client, self.config, self.ledger, has_access_log=True)
        self._reading = asyncio.create_task(self.client.run())
        if self.client.tokenizer is not None:
            self.say(SPEECH)
            self.eos = self.client.tokenizer.eos_token_ids[0]
            self.engine.script = self.recite

    async def _close(self) -> None:
        await self.client.close()
        assert self._reading is not None
        await self._reading

    def close(self) -> None:
        self.run(self._close())

    def say(self, text: str) -> None:
        """Have the engine answer with this text from now on."""
        self.speech = self.client.tokenizer.encode(text, add_special_tokens=False)

    def recite(self, request: Generate) -> Iterator[Chunk]:
        """Yield `SPEECH`, a token for each step, then the end-of-sequence token; for a resumed request, its rest."""
        tokens = [*self.speech, self.eos]
        wanted = request.sampling.prompt_logprobs
        begin = len(request.output_token_ids)
        for place, token_id in enumerate(tokens[begin : request.stopping.max_tokens], begin):
            is_last = place == request.stopping.max_tokens - 1
            reason = FinishReason.STOP if token_id == self.eos else FinishReason.LENGTH if is_last else None
            k = request.sampling.logprobs
            yield Chunk(
                request_id=request.request_id,
                token_ids=[token_id],
                logprobs=[] if k is None else [logprobs_of(token_id, k, request.sampling.logprob_token_ids)],
                prompt_logprobs=prompt_logprobs_of(request.prompt_token_ids, wanted)
                if wanted is not None and place == 0
                else None,
                num_cached_tokens=1 if place == 0 else 0,
                finish_reason=reason,
            )

    def run(self, work: Any) -> Any:
        return self._runner.run(work)

    def deliver(self, *messages: Any) -> None:
        """Deliver messages of the engine or the supervisor to the client."""

        async def deliver() -> None:
            self.engine.deliver(*messages)
            await settle()

        self.run(deliver())

    def join(
        self,
        engine: EngineId = ENGINE,
        *,
        max_model_len: int = 64,
        routing: RoutingInfo | None = None,
        pooling: PoolingSpec | None = None,
    ) -> None:
        if engine in self.client.engines:
            self.leave("it comes back as another", engine)
        info = EngineInfo(
            architecture="Tiny",
            vocab_size=320,
            max_model_len=max_model_len,
            block_size=4,
            num_kv_blocks=32,
            has_experts=routing is not None,
            routing=routing,
            pooling=pooling,
            hidden_size=4,
        )
        self.deliver(Joined(engine, "somewhere", info))

    def leave(self, cause: str, engine: EngineId = ENGINE, *, returns: bool = False, is_planned: bool = False) -> None:
        self.deliver(Left(engine, cause, returns, is_planned=is_planned))

    def stop(self) -> None:
        self.deliver(Stop(5.0))

    def request(self, method: str, path: str, **arguments: Any) -> httpx.Response:
        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
                return await http.request(method, path, **arguments)

        return self.run(request())

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return self.request("GET", path, **arguments)

    def post(self, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **arguments)

    def events(self, path: str, body: dict[str, Any], **arguments: Any) -> list[Any]:
        """Return the events of a stream, which must end with `[DONE]`."""
        response = self.post(path, {"stream": True, **body}, **arguments)
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        return parse_events(response.text)


def parse_events(text: str) -> list[Any]:
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    assert blocks.pop() == "data: [DONE]"
    return [json.loads(block.removeprefix("data: ")) for block in blocks]


class Call:
    """An HTTP request to an application, message by message, for slow readers and disconnects."""

    def __init__(
        self,
        app: Any,
        path: str,
        body: dict[str, Any],
        *,
        is_whole: bool = True,
        method: str = "POST",
        headers: Sequence[tuple[bytes, bytes]] = (),
    ) -> None:
        self.received: list[Any] = []
        self.may_send = asyncio.Event()
        self.may_send.set()
        self._incoming: asyncio.Queue[Any] = asyncio.Queue()
        message = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": not is_whole}
        self._incoming.put_nowait(message)
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "headers": [(b"x-request-id", b"mine"), *headers],
            "query_string": b"",
        }
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.may_send.wait()
        self.received.append(message)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def text(self) -> str:
        return b"".join(message.get("body", b"") for message in self.received).decode()


@contextlib.contextmanager
def serving(checkpoint: Path, **options: Any) -> Iterator[Api]:
    """Run an application with an engine. `options`: as on the command line."""
    with (
        asyncio.Runner() as runner,
        tempfile.TemporaryDirectory() as directory,
        contextlib.closing(Ledger.open(Path(directory), 0)) as ledger,
    ):
        config = build_config(**{"model": str(checkpoint), "served_model_name": ["tiny", "alias"], **options})
        api = Api(config, runner, ledger)
        api.join()
        try:
            yield api
        finally:
            api.close()


def pool_ones(request: Any) -> Iterator[Chunk]:
    """Answer a request as a pooling model does, with a vector of ones."""
    yield Chunk(request_id=request.request_id, pooled=np.ones(4, np.float32), finish_reason=FinishReason.STOP)


def stats(engine: EngineId = ENGINE, **numbers: int) -> EngineStats:
    names = [field.name for field in msgspec.structs.fields(EngineStats) if field.type is int]
    return EngineStats(engine=engine, **{name: numbers.get(name, 0) for name in names})
