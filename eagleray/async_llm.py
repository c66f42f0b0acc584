"""`AsyncLLM`: a model for a program with an event loop, with the methods of vLLM's class.

The instance runs in a thread of its own, so the methods may be called from any event loop, and recovery goes on while
the caller's loop is busy.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack

from eagleray.client.outputs import RequestOutput
from eagleray.client.pooling import PoolingOutput, PoolingParams, PoolingRequestOutput
from eagleray.client.request import RequestStream
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.config.keywords import LLMKeywords
from eagleray.engine_args import EngineArgs
from eagleray.errors import DeadlineExceeded, EngineFailed
from eagleray.generation_calls import OneParams, as_params
from eagleray.instance import POLL_INTERVAL_SECONDS, InstanceThread
from eagleray.instance_calls import InstanceCalls, missing_method
from eagleray.lora import LoRARequest
from eagleray.messages.sampling import SamplingParams
from eagleray.pooling_calls import PoolingCalls
from eagleray.prompts import PromptLike
from eagleray.streaming import OutputReader

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


@dataclass
class _SentRequest:
    """Request of a caller of `generate`, from the call until it is sent. Used in the instance's loop."""

    stream: RequestStream | None = None
    is_unwanted: bool = False
    """Whether the caller was cancelled."""


def _awaited(
    call: Callable[Concatenate[InstanceCalls, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[AsyncLLM, Parameters], Coroutine[Any, Any, Result]]:
    """Return a method that makes this call in the instance's loop and awaits its result."""

    @functools.wraps(call)
    async def method(self: AsyncLLM, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return await self._await(call(self._calls, *args, **kwargs))

    return method


class AsyncLLM:
    """A model, ready to generate. `options` are those of `LLM`. The constructor blocks until the engines serve.

    Close it with `shutdown`, or let the program exit. Raises `ConfigError` or `CheckpointError` (ValueErrors) for
    mistakes that the caller can correct.
    """

    def __init__(self, model: str | None = None, **options: Unpack[LLMKeywords]) -> None:
        self._start(EngineArgs(model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> AsyncLLM:
        """Start an instance with these options."""
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        self.config = args.config()
        self._thread = InstanceThread(self.config)
        self._instance = self._thread.instance
        self._calls = InstanceCalls(self._instance)
        self._pooling = PoolingCalls(self._instance, self._calls.loras)
        self._streams: dict[str, RequestStream] = {}
        """Streams of the requests that `generate` has sent, by id. Used in the instance's loop."""

    def __getattr__(self, name: str) -> Any:
        raise missing_method(self, name)

    # Requests.

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: OneParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and yield its outputs.

        `sampling_params.output_kind` decides whether an output has everything so far, only the new part, or is yielded
        only when it is complete. The last output is `finished`. A caller that leaves the iteration aborts the request.

        `prompt`, `sampling_params`: see `LLM.generate`. `request_id`: unique among the requests that run; by default
        one is made. Requests of one `session_id` go to the same engine while it is up. `lora_request`: adapter that
        computes the request; it is loaded if necessary. `trace_headers`: `traceparent` and `tracestate`, which name the
        parent of its span.

        Raises `InvalidRequest` for a wrong prompt or parameter, `RequestFailed` if the request failed, and
        `EngineFailed` if engines exit again and again.
        """
        params = self.get_default_sampling_params() if sampling_params is None else as_params(sampling_params)
        sent = _SentRequest()
        sending = self._send(
            sent,
            prompt,
            params,
            request_id=request_id,
            priority=priority,
            cache_salt=cache_salt,
            session=session_id,
            rank=data_parallel_rank,
            lora_request=lora_request,
            trace_headers=trace_headers,
        )
        try:
            stream = await self._await(sending)
        except BaseException:
            self._thread.call_soon(self._drop, sent)  # the caller was cancelled, perhaps before the request is sent
            raise
        outputs = OutputReader(stream, params.output_kind, self._thread).outputs()
        try:
            async for output in outputs:
                yield output
        except EngineFailed:
            with self._instance.raising_failure():
                raise
        finally:
            await outputs.aclose()
            self._thread.call_soon(self._streams.pop, stream.request_id, None)

    async def encode(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Send a prompt to a pooling model and yield its vector once, as an array (`outputs.data`): an embedding, or
        the probabilities of a classifier. A caller that leaves the iteration aborts the request.

        Raises `InvalidRequest` for a wrong prompt or parameter and for a model that generates, and otherwise as
        `generate`.
        """
        prompts: list[PromptLike] = [prompt]
        encoding = self._pooling.encode(
            prompts, pooling_params, None, lora_request=lora_request, request_id=request_id, priority=priority
        )
        (output,) = await self._await(encoding)
        yield output

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests. Their iterators yield a last output with the tokens so far and the finish reason `abort`.

        Ids of requests that do not run are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._await(self._abort(ids))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300.0) -> None:
        """Wait until no request runs or waits. `drain_timeout`: seconds. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(drain_timeout):
                while self.get_num_unfinished_requests():
                    await asyncio.sleep(POLL_INTERVAL_SECONDS)
        except TimeoutError:
            count = self.get_num_unfinished_requests()
            raise DeadlineExceeded(f"after {drain_timeout:g} s there are still {count} unfinished requests") from None

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have been sent and have not ended."""
        return self._instance.client.num_requests

    # Calls that concern the whole instance.

    pause_generation = _awaited(InstanceCalls.pause_generation)
    resume_generation = _awaited(InstanceCalls.resume_generation)
    sleep = _awaited(InstanceCalls.sleep)
    wake_up = _awaited(InstanceCalls.wake_up)
    release_kv_cache_memory = _awaited(InstanceCalls.release_kv_cache_memory)
    reset_prefix_cache = _awaited(InstanceCalls.reset_prefix_cache)
    init_weight_transfer_engine = _awaited(InstanceCalls.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _awaited(InstanceCalls.shutdown_weight_transfer_engine)
    start_weight_update = _awaited(InstanceCalls.start_weight_update)
    update_weights = _awaited(InstanceCalls.update_weights)
    finish_weight_update = _awaited(InstanceCalls.finish_weight_update)
    abort_weight_update = _awaited(InstanceCalls.abort_weight_update)
    update_weight_version = _awaited(InstanceCalls.update_weight_version)
    get_weight_version = _awaited(InstanceCalls.get_weight_version)
    get_weight_info = _awaited(InstanceCalls.get_weight_info)
    is_paused = _awaited(InstanceCalls.is_paused)
    is_sleeping = _awaited(InstanceCalls.is_sleeping)
    scale = _awaited(InstanceCalls.scale)
    scale_elastic_ep = _awaited(InstanceCalls.scale_elastic_ep)
    restart_engines = _awaited(InstanceCalls.restart_engines)
    scaling_status = _awaited(InstanceCalls.scaling_status)
    add_lora = _awaited(InstanceCalls.add_lora)
    remove_lora = _awaited(InstanceCalls.remove_lora)
    list_loras = _awaited(InstanceCalls.list_loras)
    collective_rpc = _awaited(InstanceCalls.collective_rpc)

    # The instance.

    async def check_health(self) -> None:
        """Raise the cause if the instance has failed."""
        if (error := self.dead_error) is not None:
            raise error

    @property
    def errored(self) -> bool:
        """Whether the instance has failed and will not recover."""
        return self.dead_error is not None

    @property
    def is_running(self) -> bool:
        """Whether the instance takes requests."""
        return not self.errored and self._thread.is_alive

    @property
    def dead_error(self) -> BaseException | None:
        """Error with which the instance failed; None while it runs."""
        failed = self._instance.supervisor.failed
        return failed.exception() if failed.done() else None

    async def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidRequest` under `skip_tokenizer_init`."""
        return self._instance.tokenizer

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters that `generate` uses by default, see `LLM.get_default_sampling_params`."""
        return self._instance.default_sampling_params(**changes)

    def shutdown(self, timeout: float | None = None) -> None:
        """Stop the engines. Running requests end with the tokens so far. Idempotent. `timeout` is accepted for programs
        written for vLLM; stopping has limits of its own."""
        self._thread.close()

    async def _await(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the instance's loop and wait for it here."""
        return await asyncio.wrap_future(self._thread.submit(work))

    # In the instance's loop.

    async def _send(
        self,
        sent: _SentRequest,
        prompt: PromptLike,
        params: SamplingParams,
        *,
        lora_request: LoRARequest | None,
        **options: Any,
    ) -> RequestStream:
        """Send a request, unless its caller was cancelled."""
        adapter = await self._calls.loras.find(lora_request)
        if sent.is_unwanted:
            raise asyncio.CancelledError
        sent.stream = stream = self._instance.generate(prompt, params, adapter=adapter, **options)
        self._streams[stream.request_id] = stream
        return stream

    def _drop(self, sent: _SentRequest) -> None:
        sent.is_unwanted = True
        if (stream := sent.stream) is not None:
            self._streams.pop(stream.request_id, None)
            stream.abort()

    async def _abort(self, ids: list[str]) -> None:
        for request_id in ids:
            if stream := self._streams.pop(request_id, None):
                stream.abort()


AsyncLLMEngine = AsyncLLM
