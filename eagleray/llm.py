"""`LLM`: a model for a program, with blocking calls."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

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
from eagleray.instance import InstanceThread
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
from eagleray.messages.sampling import RequestOutputKind, SamplingParams
from eagleray.prompts import Conversation, PromptLike, as_prompts, chat_prompts, one_for_each
from eagleray.streaming import OutputCollector

ParamsLike = SamplingParams | Sequence[SamplingParams] | None
LoraLike = LoRARequest | Sequence[LoRARequest | None] | None
Streams = list[tuple[RequestStream, RequestOutputKind]]


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
        self.config = EngineArgs(model, **options).config()
        self._thread = InstanceThread(self.config)
        self._instance = self._thread.instance
        self._loras = LoraRequests(self._instance.client, self._instance.control)

    # Requests.

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt; results in the order of the prompts.

        A prompt is a text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`, with an optional
        `cache_salt`. One `SamplingParams` serves all prompts, or there is one for each. With the option
        `enable_return_routed_experts` outputs have `routed_experts`, unless the parameters turn them off.
        `lora_request`: the adapter of all prompts, or one or None for each. It is loaded if it is not yet.

        Raises `InvalidRequest` at once if a prompt or parameter is wrong (then no prompt keeps running), and
        `EngineFailed` if engines exit again and again (options `max_request_restarts` and `max_engine_restarts`).
        """
        return self._thread.run(self._complete(as_prompts(prompts), sampling_params, priority, lora_request, use_tqdm))

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or each of several.

        The model's chat template renders them.
        """
        prompts = chat_prompts(
            messages,
            self.get_tokenizer(),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, lora_request=lora_request)

    def stream(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield outputs of all prompts as they come, each with the number of its prompt, as
        `SamplingParams.output_kind` says: everything so far, what is new, or only the whole output. The last output of
        a prompt is `finished`. A caller that leaves the iteration aborts what still runs.

        Prompts are sent when the iteration begins. Arguments and errors are those of `generate`.
        """
        sending = self._collect(as_prompts(prompts), sampling_params, priority, lora_request, kind=None)
        yield from self._read(*self._thread.run(sending))

    def generate_as_completed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield the whole output of each prompt as soon as it has finished, with the number of the prompt. Like
        `stream` otherwise."""
        kind = RequestOutputKind.FINAL_ONLY
        yield from self._read(
            *self._thread.run(self._collect(as_prompts(prompts), sampling_params, priority, lora_request, kind=kind))
        )

    # Steering.

    def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> dict[str, Any]:
        """Run no steps until `resume_generation`, and return the numbers of requests kept and aborted.

        `mode`: `abort` ends the requests that run, with what they have; `wait` lets them finish; `keep` freezes them,
        and they continue after the pause. Requests that come meanwhile wait. The prefix cache is emptied unless
        `clear_cache` is False or the mode is `keep`.
        """
        return self._control(pause_request(mode, clear_cache))

    def resume_generation(self) -> None:
        """End a pause."""
        self._control(Resume())

    def sleep(self, level: int = 1, mode: str = "abort", tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Return memory to the system until `wake_up`, and return the number of bytes.

        Level 1: the cache, and on GPUs the weights, which move to the host; level 2: the weights too, which are
        dropped; level 0 only stops the steps. `mode`: see `pause_generation`. `tags`: `weights` or `kv_cache` for only
        one of them.
        """
        return self._control(sleep_request(level, mode, tags))

    def wake_up(self, tags: Sequence[str] | None = None) -> bool:
        """End the sleep of these parts, by default of all. Return whether steps may run again."""
        answer = self._control(wake_up_request(tags))
        return bool(answer["status"] == "awake")

    def release_kv_cache_memory(self) -> None:
        """Return the cache's memory to the system until `wake_up`; the weights stay."""
        self._control(sleep_request(1, "keep", ["kv_cache"]))

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empty the prefix cache. Return False if requests hold blocks of it.

        With `reset_running_requests` they give them up and are computed again. `reset_connector` has no effect, since
        there are no caches outside of the engines.
        """
        answer = self._control(ResetPrefixCache(reset_running_requests=reset_running_requests))
        return bool(answer["success"])

    def init_weight_transfer_engine(self, request: Any) -> None:
        """Prepare the transfer of weights: `request` has `init_info`, see docs/rl.md."""
        self._control(init_transfer_request(request))

    def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group."""
        self._control(ShutdownWeightTransfer())

    def start_weight_update(self, is_checkpoint_format: bool = True, num_bytes: int | None = None) -> dict[str, Any]:
        """Open an update of the weights. Names of tensors are those of the checkpoint; other formats are refused."""
        return self._control(start_request(is_checkpoint_format, num_bytes))

    def update_weights(self, request: Any) -> dict[str, Any]:
        """Receive tensors of the open update: `request` has `update_info`.

        With `weight_dir` instead, the directory of a checkpoint, the update is started, read and finished in this call.
        """
        return self._control(update_request(request))

    def finish_weight_update(self, weight_version: str | None = None, require_complete: bool = False) -> dict[str, Any]:
        """Commit the open update: from the next step on, all engines compute with the new weights. Returns their number
        and name, and the names of the weights that did not come."""
        return self._control(FinishWeightUpdate(weight_version=weight_version, require_complete=require_complete))

    def abort_weight_update(self) -> None:
        """Drop what has come of the open update; the weights from before stay."""
        self._control(AbortWeightUpdate())

    def update_weight_version(self, new_version: str) -> None:
        """Change the name of the weights."""
        self._control(SetWeightVersion(new_version))

    def get_weight_version(self) -> str:
        """Return the name of the weights, which the trainer gave."""
        answer = self._control(GetWeightInfo())
        return str(answer["weight_version"])

    def get_weight_info(self) -> dict[str, Any]:
        """Return the state, the number and the name of the weights, and those of every engine."""
        return self._control(GetWeightInfo())

    def is_paused(self) -> bool:
        """Return whether steps are paused."""
        return bool(self._instance.client.state.pause)

    def is_sleeping(self) -> bool:
        """Return whether some part sleeps."""
        return bool(self._instance.client.state.asleep)

    # Adapters.

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter on all engines, or replace it (`load_inplace`): requests that run keep the one that they
        began with. Returns False if it is loaded already, from the same directory.

        Raises `NotFound` if there is no such directory, and `CheckpointError` if the adapter does not fit the model.
        """
        return self._thread.run(self._loras.add(lora_request))

    def remove_lora(self, lora_id: int) -> bool:
        """Unload the adapter with this `lora_int_id`. Requests that run with it end with it. Returns False if there is
        none."""
        return self._thread.run(self._loras.remove(lora_id))

    def list_loras(self) -> set[int]:
        """Return the `lora_int_id`s of the adapters that this object has loaded."""
        return self._loras.ids()

    # The instance.

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the worker extension (option `worker_extension_cls`), or a built-in one, on every worker of
        every engine.

        Returns the results by engine, then by rank of the worker. Waits for engines that are coming back. Arguments and
        results are None, bool, int, float, str, bytes, lists, tuples (which become lists), dicts, numpy arrays, tensors
        on the host, dtypes and sizes of torch, and handles of CUDA tensors (`reduce_tensor`), nested. `timeout`:
        seconds for the workers; None: ten minutes. No tokens are generated during the call.

        Raises `InvalidRequest` for a call that is impossible or cannot be sent, `RequestFailed` if the method raised on
        a rank (the engines continue), `DeadlineExceeded`, and `EngineFailed` if an engine exits during the call, which
        is not repeated then.
        """
        return self._thread.run(self._instance.call_workers(method, args, kwargs, timeout))

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidRequest` under `skip_tokenizer_init`."""
        return self._instance.tokenizer

    def get_default_sampling_params(self, **changes: Any) -> SamplingParams:
        """Return the parameters that `generate` uses by default: the model's own (`generation_config`).

        `changes` override them.
        """
        return self._instance.default_sampling_params(**changes)

    def close(self) -> None:
        """Stop the engines. Idempotent."""
        self._thread.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _control(self, request: ControlRequest) -> dict[str, Any]:
        return self._thread.run(self._instance.control(request))

    # Parts of `generate` and `stream`, in the instance's loop unless they are plain functions.

    async def _complete(
        self,
        prompts: Sequence[PromptLike],
        params: ParamsLike,
        priority: Sequence[int] | None,
        lora_request: LoraLike,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        streams = await self._send_all(prompts, params, priority, lora_request)
        try:
            with tqdm(total=len(streams), desc="prompts", disable=not use_tqdm) as bar:

                async def finish(stream: RequestStream) -> RequestOutput:
                    output = await stream.result()
                    bar.update()
                    return output

                return await self._instance.guard(_gather([finish(stream) for stream, _ in streams]))
        finally:
            _abort_all(streams)

    async def _collect(
        self,
        prompts: Sequence[PromptLike],
        params: ParamsLike,
        priority: Sequence[int] | None,
        lora_request: LoraLike,
        *,
        kind: RequestOutputKind | None,
    ) -> tuple[OutputCollector, Streams]:
        streams = await self._send_all(prompts, params, priority, lora_request, kind=kind)
        return OutputCollector(streams), streams

    def _read(self, collector: OutputCollector, streams: Streams) -> Iterator[tuple[int, RequestOutput]]:
        try:
            while outputs := self._thread.run(self._instance.guard(collector.next())):
                yield from outputs
        finally:
            self._thread.call_soon(_abort_all, streams)

    async def _send_all(
        self,
        prompts: Sequence[PromptLike],
        params: ParamsLike,
        priority: Sequence[int] | None,
        lora_request: LoraLike,
        kind: RequestOutputKind | None = None,
    ) -> Streams:
        """Send a request for each prompt, or none if one is wrong. `kind`: content of the outputs; None: as the
        parameters say."""
        all_params = one_for_each(params or self.get_default_sampling_params(), len(prompts), "sampling_params")
        priorities = one_for_each(0 if priority is None else priority, len(prompts), "priority")
        adapters = [await self._loras.find(one) for one in one_for_each(lora_request, len(prompts), "lora_request")]
        streams: Streams = []
        try:
            for prompt, one, rank, adapter in zip(prompts, all_params, priorities, adapters, strict=True):
                stream = self._instance.generate(prompt, one, priority=rank, adapter=adapter)
                streams.append((stream, kind or one.output_kind))
        except BaseException:
            _abort_all(streams)
            raise
        return streams


def _abort_all(streams: Streams) -> None:
    for stream, _ in streams:
        stream.abort()


async def _gather(work: Sequence[Coroutine[Any, Any, RequestOutput]]) -> list[RequestOutput]:
    return await asyncio.gather(*work)
