"""An instance inside of a program: the supervisor and a client, in an event loop with a thread of its own.

So heartbeats and recovery go on while the program computes. Used by `LLM` and `AsyncLLM`.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

import msgspec

from eagleray.client.client import Client
from eagleray.client.request import RequestStream
from eagleray.client.text.generation_config import default_sampling
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.cluster import context
from eagleray.config.sections import Config
from eagleray.errors import EngineFailed, InvalidRequest, Unavailable
from eagleray.fleet.supervisor import Supervisor
from eagleray.hub.replacement import prepare_replacement
from eagleray.identity import ClientId
from eagleray.messages.adapters import Adapter
from eagleray.messages.control import ControlRequest
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.scaling import FleetRequest
from eagleray.messages.workers import RayContext
from eagleray.prompts import PromptLike, parse_prompt

Result = TypeVar("Result")

POLL_INTERVAL_SECONDS = 0.02

STOP_TIMEOUT_SECONDS = 30.0


class LocalInstance:
    """The supervisor, and a client with the task that runs it. Everything happens in one event loop."""

    def __init__(self, config: Config, supervisor: Supervisor, client: Client) -> None:
        self.config = config
        self.supervisor = supervisor
        self.client = client
        self._client_task = asyncio.create_task(client.run())

    @classmethod
    async def start(cls, config: Config, ray: RayContext | None) -> LocalInstance:
        """Start the engines, and wait until they serve."""
        async with AsyncExitStack() as stack:
            supervisor = await Supervisor.open(config, ray=ray)
            stack.push_async_callback(supervisor.stop, 0.0)
            supervisor.start_engines()
            client_id = ClientId(supervisor.instance, index=0)
            client = Client.open(
                client_id,
                config,
                supervisor.runtime_dir,
                prepare_checkpoint=partial(prepare_replacement, config.model),
                host=supervisor.host,
            )
            instance = cls(config, supervisor, client)
            stack.push_async_callback(instance.stop_client)
            supervisor.adopt(client_id, client.address)
            await instance.guard(supervisor.serving.wait())
            stack.pop_all()
            return instance

    def generate(
        self,
        prompt: PromptLike,
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        session: str | None = None,
        rank: int | None = None,
        adapter: Adapter | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> RequestStream:
        """Send a request, see `Client.generate`. Routed experts are reported if the option is on and the parameters do
        not turn them off."""
        parsed = parse_prompt(prompt)
        if self.config.model.enable_return_routed_experts and params.return_routed_experts is None:
            params = msgspec.structs.replace(params, return_routed_experts=True)
        with self.raising_failure():
            return self.client.generate(
                parsed.prompt,
                params,
                request_id=request_id,
                priority=priority,
                cache_salt=parsed.cache_salt if cache_salt is None else cache_salt,
                session=session,
                rank=rank,
                adapter=adapter,
                trace_headers=trace_headers,
            )

    def pool(
        self, prompt: PromptLike, *, request_id: str | None = None, priority: int = 0, adapter: Adapter | None = None
    ) -> RequestStream:
        """Send a request to a pooling model, see `Client.pool`."""
        parsed = parse_prompt(prompt)
        with self.raising_failure():
            return self.client.pool(
                parsed.prompt,
                request_id=request_id,
                priority=priority,
                cache_salt=parsed.cache_salt,
                adapter=adapter,
            )

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises `InvalidRequest` under `skip_tokenizer_init`."""
        if self.client.tokenizer is None:
            raise InvalidRequest("there is no tokenizer, because of `skip_tokenizer_init`: use token ids")
        return self.client.tokenizer

    def default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the model's own parameters (`generation_config`); `changes` override them."""
        return SamplingParams(**default_sampling(self.config.model) | changes)

    async def call_workers(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float | None
    ) -> list[Any]:
        """Call a method on every worker of every engine, see `Client.call_workers`. Waits for engines that restart."""
        with self.raising_failure():
            await self.guard(self._wait_for_all_engines())
            return await self.guard(self.client.call_workers(method, args, kwargs, timeout=timeout))

    async def control(
        self, request: ControlRequest | FleetRequest, timeout: float | None = None, operation_id: str | None = None
    ) -> dict[str, Any]:
        """Execute a control call and return its answer, see `Client.control`."""
        with self.raising_failure():
            return await self.guard(self.client.control(request, timeout=timeout, operation_id=operation_id))

    @contextmanager
    def raising_failure(self) -> Iterator[None]:
        """Within the block, replace the error of a lack of engines by the instance's failure, if it has failed."""
        try:
            yield
        except (EngineFailed, Unavailable):
            if self.supervisor.failed.done():
                self.supervisor.failed.result()
            raise

    async def guard(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, or raise the instance's failure if that comes first."""
        task = asyncio.create_task(work)
        either: list[asyncio.Future[Any]] = [task, self.supervisor.failed]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self.supervisor.failed.result()
            with self.raising_failure():
                return await task
        finally:
            task.cancel()

    async def stop_client(self) -> None:
        await self.client.close()
        await asyncio.gather(self._client_task, return_exceptions=True)

    async def stop(self) -> None:
        """Stop all processes."""
        await self.stop_client()
        await self.supervisor.stop(0.0)

    async def _wait_for_all_engines(self) -> None:
        """Wait until the client knows every engine that the supervisor has or expects.

        The supervisor gives up engines that do not start.
        """
        while set(self.client.engines) != self.supervisor.engines:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)


class InstanceThread:
    """Runs a `LocalInstance` in the event loop of a thread, until `close` is called, this object is collected, or the
    program exits."""

    def __init__(self, config: Config) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="eagleray-llm", daemon=True)
        self._thread.start()
        try:
            # Read here, because Ray knows the current task in the calling thread, but not in the loop's.
            self.instance: LocalInstance = self.run(LocalInstance.start(config, context.current_ray_context()))
        except BaseException:
            _stop_loop(self.loop, self._thread)
            raise
        self.close = weakref.finalize(self, _close, self.instance, self.loop, self._thread)
        """Stop the engines. Idempotent."""

    @property
    def is_alive(self) -> bool:
        """Whether the instance was not closed, and belongs to this process and not to the parent of a fork."""
        return self._thread.is_alive()

    def call_soon(self, function: Callable[..., Any], *args: Any) -> None:
        """Call a function in the loop; if it is closed, do nothing."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(function, *args)

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine in the loop. Raises `InvalidRequest` if it is closed."""
        if not self._thread.is_alive():
            coroutine.close()
            raise InvalidRequest("this LLM is closed, or belongs to the process that this one was forked from")
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop and wait for it. An interruption of the wait cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def _close(instance: LocalInstance, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # in a forked process, which must not stop the engines of its parent
        return
    if thread is threading.current_thread():  # garbage collected there, and the loop cannot wait for itself
        threading.Thread(target=_close, args=(instance, loop, thread), name="eagleray-llm-close").start()
        return
    asyncio.run_coroutine_threadsafe(instance.stop(), loop).result(Supervisor.stop_seconds(0.0))
    _stop_loop(loop, thread)


def _stop_loop(loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    asyncio.run_coroutine_threadsafe(_finish_tasks(), loop).result(STOP_TIMEOUT_SECONDS)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(STOP_TIMEOUT_SECONDS)
    loop.close()


async def _finish_tasks() -> None:
    """Wait for cancelled tasks that still clean up, such as a start that has left processes."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)
    await asyncio.get_running_loop().shutdown_default_executor()
