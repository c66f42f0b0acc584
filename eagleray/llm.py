"""`LLM`: a model for a program, with blocking calls, on the server's supervisor and client.

Both run in an event loop, in a thread that the object owns; the engines are processes or Ray actors.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from typing import Any, TypeVar

import msgspec
from tqdm import tqdm

from eagleray.client.client import Client
from eagleray.client.outputs import RequestOutput
from eagleray.client.preprocess import Prompt
from eagleray.client.request import RequestStream
from eagleray.client.text.generation_config import default_sampling
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.cluster import context
from eagleray.config.build import build_config
from eagleray.config.resolve import checkpoint_dir
from eagleray.config.sections import Config, ServingConfig
from eagleray.errors import ConfigError, EngineFailed, InvalidRequest, Unavailable
from eagleray.fleet.supervisor import Supervisor
from eagleray.identity import ClientId
from eagleray.log import setup_logging
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.workers import RayContext

Result = TypeVar("Result")
PromptLike = str | Sequence[int] | Mapping[str, Any]
Conversation = Sequence[Mapping[str, Any]]

POLL_INTERVAL_SECONDS = 0.02

STOP_TIMEOUT_SECONDS = 30.0


class LLM:
    """A model, ready to generate.

    `options` are the flags of `eagleray serve` by their names (`max_model_len=2048`), except those of the HTTP server.
    With `data_parallel_size` there are several engines, which share the prompts. When one exits, or is killed, its
    prompts continue on the others, and a new engine replaces it.

    In a Ray actor, engines join the actor's cluster, and its placement group if that has room beside the actor; their
    workers get the actor's runtime_env. `placement_group` may be Ray's object, its id or its name.

    Close it, use it as a context manager, or let the program exit: its processes exit with it.

    Raises `ConfigError` or `CheckpointError` (ValueErrors) for mistakes that the caller can correct.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        for field in msgspec.structs.fields(ServingConfig):
            if field.name in options:
                raise ConfigError(f"option `{field.name}` is for the HTTP server: `LLM` does not take it")
        options["placement_group"] = _placement_group_id(options.get("placement_group"))
        self.config = build_config(model=model, **options)
        checkpoint_dir(self.config.model)
        setup_logging("llm", self.config.execution.log_level)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="eagleray-llm", daemon=True)
        self._thread.start()
        try:
            # Read here, because Ray knows the current task in the calling thread, but not in the loop's.
            self._fleet: _Fleet = self._run(_Fleet.start(self.config, context.current_ray_context()))
        except BaseException:
            _stop_loop(self._loop, self._thread)
            raise
        self._close = weakref.finalize(self, _close, self._fleet, self._loop, self._thread)

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        A prompt is a text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`, with an optional
        `cache_salt`. One `SamplingParams` serves all prompts, or there is one for each. With the option
        `enable_return_routed_experts` outputs have `routed_experts`, unless the parameters turn them off.

        Raises `InvalidRequest` at once if a prompt or parameter is wrong (then no prompt keeps running), and
        `EngineFailed` if engines exit again and again (options `max_request_restarts` and `max_engine_restarts`).
        """
        return self._run(self._complete(_as_list(prompts), sampling_params, priority, use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or each of several.

        The model's chat template renders them.
        """
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self.get_tokenizer()
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            prompts.append({"prompt": text, "prompt_token_ids": tokenizer.encode(text, add_special_tokens=False)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (option `worker_extension_cls`) on every worker of every engine.

        Returns the results by engine, then by rank of the worker. Waits for engines that are coming back. Arguments and
        results are None, bool, int, float, str, bytes, lists, tuples (which become lists), dicts, numpy arrays, tensors
        on the host, dtypes and sizes of torch, and handles of CUDA tensors (`reduce_tensor`), nested. `timeout`:
        seconds for the workers; None: ten minutes. No tokens are generated during the call.

        Raises `InvalidRequest` for a call that is impossible or cannot be sent, `RequestFailed` if the method raised on
        a rank (the engines continue), `DeadlineExceeded`, and `EngineFailed` if an engine exits during the call, which
        is not repeated then.
        """
        return self._run(self._call_workers(method, args, kwargs, timeout))

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidRequest` under `skip_tokenizer_init`."""
        tokenizer = self._fleet.client.tokenizer
        if tokenizer is None:
            raise InvalidRequest("there is no tokenizer, because of `skip_tokenizer_init`: use token ids")
        return tokenizer

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters that `generate` uses by default: the model's own (`generation_config`).

        `changes` override them.
        """
        return SamplingParams(**default_sampling(self.config.model) | changes)

    def close(self) -> None:
        """Stop the engines. Idempotent."""
        self._close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the loop's thread and wait for it. An interruption of the wait cancels it."""
        if not self._thread.is_alive():
            coroutine.close()
            raise InvalidRequest("this LLM is closed, or belongs to the process that this one was forked from")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _call_workers(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float | None
    ) -> list[Any]:
        with self._fleet.raising_failure():
            await self._fleet.guard(self._fleet.wait_for_all_engines())
            call = self._fleet.client.call_workers(method, args, kwargs, timeout=timeout)
            return await self._fleet.guard(call)

    async def _complete(
        self,
        prompts: Sequence[PromptLike],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        all_params = _one_each(params or self.get_default_sampling_params(), len(prompts), "sampling_params")
        priorities = _one_each(0 if priority is None else priority, len(prompts), "priority")
        streams: list[RequestStream] = []
        try:
            for prompt, one, rank in zip(prompts, all_params, priorities, strict=True):
                parsed, cache_salt = _parse(prompt)
                if self.config.model.enable_return_routed_experts and one.return_routed_experts is None:
                    one = msgspec.structs.replace(one, return_routed_experts=True)
                streams.append(self._fleet.generate(parsed, one, priority=rank, cache_salt=cache_salt))
            with tqdm(total=len(streams), desc="prompts", disable=not use_tqdm) as bar:

                async def finish(stream: RequestStream) -> RequestOutput:
                    output = await stream.result()
                    bar.update()
                    return output

                return await self._fleet.guard(_gather([finish(stream) for stream in streams]))
        finally:
            for stream in streams:
                stream.abort()


def _placement_group_id(given: Any) -> Any:
    """Return the id of a placement group if `given` is Ray's own object, else `given`.

    The object is recognized by its attributes, because programs without Ray must not import it.
    """
    return given.id.hex() if hasattr(given, "bundle_specs") else given


class _Fleet:
    """The objects in the loop's thread: the supervisor, and the client with the task that runs it."""

    def __init__(self, supervisor: Supervisor, client: Client) -> None:
        self.supervisor = supervisor
        self.client = client
        self._client_task = asyncio.create_task(client.run())

    @classmethod
    async def start(cls, config: Config, ray: RayContext | None) -> _Fleet:
        async with AsyncExitStack() as stack:
            supervisor = await Supervisor.open(config, ray=ray)
            stack.push_async_callback(supervisor.stop, 0.0)
            supervisor.start_engines()
            client_id = ClientId(supervisor.instance, index=0)
            fleet = cls(supervisor, Client.open(client_id, config, supervisor.runtime_dir, host=supervisor.host))
            stack.push_async_callback(fleet.stop_client)
            supervisor.adopt(client_id, fleet.client.address)
            await fleet.guard(fleet.supervisor.serving.wait())
            stack.pop_all()
            return fleet

    def generate(self, prompt: Prompt, params: SamplingParams, *, priority: int, cache_salt: str) -> RequestStream:
        with self.raising_failure():
            return self.client.generate(prompt, params, priority=priority, cache_salt=cache_salt)

    @contextmanager
    def raising_failure(self) -> Iterator[None]:
        """Within the block, replace the error of a lack of engines by the instance's failure, if it has failed."""
        try:
            yield
        except (EngineFailed, Unavailable):
            if self.supervisor.failed.done():
                self.supervisor.failed.result()
            raise

    async def wait_for_all_engines(self) -> None:
        """Wait until the client knows every engine that the supervisor has or expects.

        The supervisor gives up engines that do not start.
        """
        while set(self.client.engines) != self.supervisor.engines:
            await asyncio.sleep(POLL_INTERVAL_SECONDS)

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
        await self.stop_client()
        await self.supervisor.stop(0.0)


def _close(fleet: _Fleet, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    if not thread.is_alive():  # in a forked process, which must not stop the engines of its parent
        return
    if thread is threading.current_thread():  # garbage collected there, and the loop cannot wait for itself
        threading.Thread(target=_close, args=(fleet, loop, thread), name="eagleray-llm-close").start()
        return
    asyncio.run_coroutine_threadsafe(fleet.stop(), loop).result(Supervisor.stop_seconds(0.0))
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


async def _gather(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    return await asyncio.gather(*work)


def _as_list(prompts: PromptLike | Sequence[PromptLike]) -> Sequence[PromptLike]:
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def _parse(prompt: PromptLike) -> tuple[Prompt, str]:
    match prompt:
        case str():
            return Prompt(text=prompt), ""
        case Mapping():
            if unknown := set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"}:
                raise InvalidRequest(f"a prompt has no field {sorted(unknown)[0]!r}", param="prompt")
            ids = prompt.get("prompt_token_ids")
            return Prompt(prompt.get("prompt"), None if ids is None else list(ids)), prompt.get("cache_salt", "")
        case _:
            return Prompt(token_ids=list(prompt)), ""


def _one_each(values: Any, count: int, name: str) -> Sequence[Any]:
    """Return a value for each of `count` prompts, from one for all or from a sequence of that length."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise InvalidRequest(f"`{name}` has {len(values)} entries for {count} prompts", param=name)
    return values
