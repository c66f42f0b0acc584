"""`AsyncLLM`: a model for a program with an event loop, with the methods that users of vLLM know.

The instance runs in a thread of its own, so the methods may be called from any event loop, and recovery goes on while
the caller's loop is busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from eagleray.client.control_requests import (
    init_transfer_request,
    pause_request,
    sleep_request,
    start_request,
    update_request,
    wake_up_request,
)
from eagleray.client.outputs import RequestOutput
from eagleray.client.request import RequestStream
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.engine_args import EngineArgs
from eagleray.errors import DeadlineExceeded, EngineFailed
from eagleray.instance import POLL_INTERVAL_SECONDS, InstanceThread
from eagleray.lora import LoRARequest, LoraRequests
from eagleray.messages.control import (
    AbortWeightUpdate,
    ControlRequest,
    FinishWeightUpdate,
    GetWeightInfo,
    ResetPrefixCache,
    Resume,
    SetWeightVersion,
    ShutdownWeightTransfer,
)
from eagleray.messages.sampling import SamplingParams
from eagleray.prompts import PromptLike
from eagleray.streaming import OutputReader

Result = TypeVar("Result")


@dataclass
class _SentRequest:
    """A request that a caller of `generate` awaits to be sent. Used in the instance's loop."""

    stream: RequestStream | None = None
    is_unwanted: bool = False
    """Whether the caller was cancelled."""


class AsyncLLM:
    """A model, ready to generate. `options` are those of `LLM`; making it blocks until the engines serve.

    Close it with `shutdown`, or let the program exit. Raises `ConfigError` or `CheckpointError` (ValueErrors) for
    mistakes that the caller can correct.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
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
        self._loras = LoraRequests(self._instance.client, self._instance.control)
        self._streams: dict[str, RequestStream] = {}
        """Streams of the requests that `generate` has sent, by id. Used in the instance's loop."""

    # Requests.

    async def generate(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Send a request and yield its outputs, as `sampling_params.output_kind` says: everything so far, what is new,
        or only the whole one. The last output is `finished`. A caller that leaves the iteration aborts the request.

        `prompt`: see `LLM.generate`. `request_id`: unique among the requests that run; by default one is made. Requests
        of one `session_id` go to the same engine while it is up. `lora_request`: the adapter that computes it; one that
        is not loaded yet is loaded.

        Raises `InvalidRequest` for a wrong prompt or parameter, `RequestFailed` if the request failed, and
        `EngineFailed` if engines exit again and again.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
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
        )
        try:
            stream = await self._await(sending)
        except BaseException:
            self._thread.call_soon(self._drop, sent)  # the caller was cancelled, perhaps before the request is sent
            raise
        outputs = OutputReader(stream, params.output_kind, self._thread).__aiter__()
        try:
            async for output in outputs:
                yield output
        except EngineFailed:
            with self._instance.raising_failure():
                raise
        finally:
            await outputs.aclose()
            self._thread.call_soon(self._streams.pop, stream.request_id, None)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End these requests. Their iterators yield a last output with what there is, whose finish reason is `abort`.

        Ids of requests that do not run are ignored.
        """
        ids = [request_id] if isinstance(request_id, str) else list(request_id)
        await self._await(self._abort(ids))

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300.0) -> None:
        """Wait until no request runs or waits. Raises `DeadlineExceeded`."""
        try:
            async with asyncio.timeout(drain_timeout):
                while self.get_num_unfinished_requests():
                    await asyncio.sleep(POLL_INTERVAL_SECONDS)
        except TimeoutError:
            count = self.get_num_unfinished_requests()
            raise DeadlineExceeded(f"after {drain_timeout:g} s there are still {count} unfinished requests") from None

    def get_num_unfinished_requests(self) -> int:
        """Return the number of requests that have been sent and have not ended."""
        return self._instance.client.num_in_flight

    # Steering: the methods of `LLM`, and their answers.

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """See `LLM.pause_generation`."""
        return await self._control(pause_request(mode, clear_cache))

    async def resume_generation(self) -> None:
        """See `LLM.resume_generation`."""
        await self._control(Resume())

    async def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> dict[str, Any]:
        """See `LLM.sleep`."""
        return await self._control(sleep_request(level, mode, tags))

    async def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """See `LLM.wake_up`."""
        answer = await self._control(wake_up_request(tags))
        return bool(answer["status"] == "awake")

    async def release_kv_cache_memory(self) -> None:
        """See `LLM.release_kv_cache_memory`."""
        await self._control(sleep_request(1, "keep", ["kv_cache"]))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """See `LLM.reset_prefix_cache`."""
        answer = await self._control(ResetPrefixCache(reset_running_requests=reset_running_requests))
        return bool(answer["success"])

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """See `LLM.init_weight_transfer_engine`."""
        await self._control(init_transfer_request(request))

    async def shutdown_weight_transfer_engine(self) -> None:
        """See `LLM.shutdown_weight_transfer_engine`."""
        await self._control(ShutdownWeightTransfer())

    async def start_weight_update(
        self, is_checkpoint_format: bool = True, num_bytes: int | None = None
    ) -> dict[str, Any]:
        """See `LLM.start_weight_update`."""
        return await self._control(start_request(is_checkpoint_format, num_bytes))

    async def update_weights(self, request: Any) -> dict[str, Any]:
        """See `LLM.update_weights`."""
        return await self._control(update_request(request))

    async def finish_weight_update(
        self, weight_version: str | None = None, require_complete: bool = False
    ) -> dict[str, Any]:
        """See `LLM.finish_weight_update`."""
        return await self._control(FinishWeightUpdate(weight_version=weight_version, require_complete=require_complete))

    async def abort_weight_update(self) -> None:
        """See `LLM.abort_weight_update`."""
        await self._control(AbortWeightUpdate())

    async def update_weight_version(self, new_version: str) -> None:
        """See `LLM.update_weight_version`."""
        await self._control(SetWeightVersion(new_version))

    async def get_weight_version(self) -> str:
        """See `LLM.get_weight_version`."""
        answer = await self._control(GetWeightInfo())
        return str(answer["weight_version"])

    async def get_weight_info(self) -> dict[str, Any]:
        """See `LLM.get_weight_info`."""
        return await self._control(GetWeightInfo())

    async def is_paused(self) -> bool:
        """See `LLM.is_paused`."""
        return bool(self._instance.client.state.pause)

    async def is_sleeping(self) -> bool:
        """See `LLM.is_sleeping`."""
        return bool(self._instance.client.state.asleep)

    # Adapters.

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """See `LLM.add_lora`."""
        return await self._await(self._loras.add(lora_request))

    async def remove_lora(self, lora_id: int) -> bool:
        """See `LLM.remove_lora`."""
        return await self._await(self._loras.remove(lora_id))

    async def list_loras(self) -> set[int]:
        """See `LLM.list_loras`."""
        return self._loras.ids()

    # The instance.

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method on every worker of every engine, see `LLM.collective_rpc`."""
        return await self._await(self._instance.call_workers(method, args, kwargs, timeout))

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
        """Stop the engines. Requests that run end with what they have. Idempotent. `timeout` is accepted for programs
        written for vLLM; stopping has limits of its own."""
        self._thread.close()

    async def _control(self, request: ControlRequest) -> dict[str, Any]:
        return await self._await(self._instance.control(request))

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
        """Send a request, unless its caller is no longer there."""
        adapter = await self._loras.find(lora_request)
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
