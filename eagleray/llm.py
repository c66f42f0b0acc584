"""`LLM`: a model for a program, with blocking calls."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from eagleray.client.answers.requested_tools import CHAT_TOOLS, choose_tools, read_tools
from eagleray.client.outputs import RequestOutput
from eagleray.client.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    PoolingTask,
    ScoringOutput,
)
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.config.keywords import LLMKeywords
from eagleray.engine_args import EngineArgs
from eagleray.errors import InvalidRequest
from eagleray.generation_calls import (
    ErrorsMode,
    GenerationCalls,
    ParamsLike,
    PromptBatch,
    PromptBatches,
    PromptsLike,
    Sent,
    all_prompts,
    divide_output,
    plan_params,
)
from eagleray.instance import InstanceThread
from eagleray.instance_calls import InstanceCalls, missing_method
from eagleray.lora import LoraLike, LoRARequest
from eagleray.messages.sampling import SamplingParams
from eagleray.pooling_calls import ParamsLike as PoolingParamsLike
from eagleray.pooling_calls import PoolingCalls
from eagleray.prompts import Conversation, PromptLike, chat_prompts
from eagleray.row_errors import RequestError
from eagleray.streaming import OutputCollector, OutputOrError

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def _blocking(
    call: Callable[Concatenate[InstanceCalls, Parameters], Coroutine[Any, Any, Result]],
) -> Callable[Concatenate[LLM, Parameters], Result]:
    """Return a method that makes this call and waits for its result."""

    @functools.wraps(call)
    def method(self: LLM, /, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        return self._thread.run(call(self._calls, *args, **kwargs))

    return method


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

    def __init__(self, model: str | None = None, **options: Unpack[LLMKeywords]) -> None:
        self._start(EngineArgs(model, **options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Start an instance with these options."""
        llm = cls.__new__(cls)
        llm._start(engine_args)
        return llm

    def _start(self, args: EngineArgs) -> None:
        self.config = args.config()
        self._thread = InstanceThread(self.config)
        self._instance = self._thread.instance
        self._calls = InstanceCalls(self._instance)
        self._generation = GenerationCalls(self._instance, self._calls.loras)
        self._pooling = PoolingCalls(self._instance, self._calls.loras)
        self._enqueued: list[Sent | RequestError] = []

    def __getattr__(self, name: str) -> Any:
        raise missing_method(self, name)

    # Requests.

    @overload
    def generate(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: Literal["raise"] = "raise",
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: Literal["return"],
    ) -> list[OutputOrError]: ...

    def generate(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: ErrorsMode = "raise",
    ) -> list[RequestOutput] | list[OutputOrError]:
        """Complete every prompt; results in the order of the prompts.

        A prompt is a text, token ids, or `{"prompt": text}` / `{"prompt_token_ids": ids}`, with an optional
        `cache_salt`; prompts may be an iterator. One `SamplingParams`, or a dictionary of its fields, serves all
        prompts, or there is one for each. With the option `enable_return_routed_experts` outputs have
        `routed_experts`, unless the parameters turn them off. `lora_request`: the adapter of all prompts, or an
        adapter or None for each. Adapters that are not loaded yet are loaded.

        Raises `InvalidRequest` at once if a prompt or parameter is wrong (then no prompt keeps running); of several
        prompts the message names the index. With `errors="return"` a `RequestError` takes the place of each output of
        a prompt that is wrong or fails. Raises `EngineFailed` if engines exit again and again (options
        `max_request_restarts` and `max_engine_restarts`).
        """
        batch = PromptBatch(0, all_prompts(prompts), sampling_params, priority, lora_request)
        return self._thread.run(self._generation.complete(batch, errors, use_tqdm))

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
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, a list of `{"role", "content"}`, or each of several.

        The model's chat template renders them. The outputs of a prompt have `reasoning`, `content` and `tool_calls`
        beside `text`, which is all that the model wrote. `tools`, `tool_choice`: in OpenAI's form, see docs/tools.md.

        Raises as `generate`, and `InvalidRequest` that names the field of a wrong tool.
        """
        requested = choose_tools(read_tools(tools, CHAT_TOOLS), tool_choice, is_parallel=parallel_tool_calls)
        plan = self._instance.client.answer_formats.plan(requested)
        prompts = chat_prompts(
            messages,
            self.get_tokenizer(),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
            tools=plan.requested.offered.shown,
        )
        params = plan_params(sampling_params, plan, self._instance)
        outputs = self.generate(prompts, params, use_tqdm=use_tqdm, lora_request=lora_request)
        for output in outputs:
            divide_output(plan, output)
        return outputs

    def enqueue(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[str]:
        """Send prompts without waiting for them, and return their request ids. `wait_for_completion` returns their
        outputs. Arguments and errors are those of `generate`. `use_tqdm` is accepted for programs written for vLLM:
        only `wait_for_completion` shows a bar."""
        batch = PromptBatch(0, all_prompts(prompts), sampling_params, priority, lora_request)
        sent = self._thread.run(self._generation.send(batch, errors="raise"))
        self._enqueued += sent
        return [one[0].request_id for one in sent if not isinstance(one, RequestError)]

    def wait_for_completion(self, *, use_tqdm: bool = True) -> list[RequestOutput]:
        """Return the outputs of all prompts that were enqueued, in that order. Raises as `generate`."""
        enqueued, self._enqueued = self._enqueued, []
        outputs = self._thread.run(self._generation.finish(enqueued, "raise", use_tqdm))
        return [output for output in outputs if isinstance(output, RequestOutput)]

    def stream(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield outputs of all prompts as they come, each with the index of its prompt.

        `SamplingParams.output_kind` decides whether an output has everything so far, only the new part, or is yielded
        only when it is complete. The last output of a prompt is `finished`. A caller that leaves the iteration aborts
        the prompts that still run.

        Prompts are sent when the iteration begins. Arguments and errors are those of `generate`.
        """
        collector = OutputCollector()
        batch = PromptBatch(0, all_prompts(prompts), sampling_params, priority, lora_request)
        self._thread.run(self._generation.add(collector, batch, errors="raise", kind=None))
        try:
            while outputs := self._next_of(collector):
                yield from ((index, output) for index, output in outputs if isinstance(output, RequestOutput))
        finally:
            self._thread.call_soon(collector.abort)

    @overload
    def generate_as_completed(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: Literal["raise"] = "raise",
        max_in_flight: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput]]: ...

    @overload
    def generate_as_completed(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: Literal["return"],
        max_in_flight: int | None = None,
    ) -> Iterator[tuple[int, OutputOrError]]: ...

    def generate_as_completed(
        self,
        prompts: PromptsLike,
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoraLike = None,
        priority: int | Sequence[int] | None = None,
        errors: ErrorsMode = "raise",
        max_in_flight: int | None = None,
    ) -> Iterator[tuple[int, OutputOrError]]:
        """Yield the whole output of each prompt as soon as it has finished, with the index of the prompt. Otherwise
        as `generate` and `stream`.

        At most `max_in_flight` prompts run at a time; by default all of a list, and of an iterator, which is read only
        that far ahead, twice as many as the engines run.
        """
        if max_in_flight is not None and max_in_flight < 1:
            raise InvalidRequest(f"`max_in_flight` must be at least 1, but is {max_in_flight}", param="max_in_flight")
        batches = PromptBatches(prompts, sampling_params, priority, lora_request)
        limit = max_in_flight or batches.num_prompts or self._default_in_flight
        collector = OutputCollector(returns_errors=errors == "return")
        try:
            while True:
                if (batch := batches.next(limit - collector.num_streams)) is not None:
                    self._thread.run(self._generation.add(collector, batch, errors=errors))
                if not (outputs := self._next_of(collector)):
                    return
                yield from outputs
        finally:
            self._thread.call_soon(collector.abort)

    def _next_of(self, collector: OutputCollector) -> list[tuple[int, OutputOrError]]:
        return self._thread.run(self._instance.guard(collector.next()))

    @property
    def _default_in_flight(self) -> int:
        return 2 * self.config.scheduling.max_num_seqs * len(self._instance.client.ranks)

    # Requests to pooling models.

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParamsLike = None,
        lora_request: LoraLike = None,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """Return the embedding of every prompt (`outputs.embedding`), in the order of the prompts.

        Raises `InvalidRequest` at once if a prompt is wrong, or the model is not an embedding model.
        """
        return self._thread.run(self._pooling.embed(prompts, pooling_params, lora_request, use_tqdm))

    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling_params: PoolingParamsLike = None,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """Return the probabilities of the classes of every prompt (`outputs.probs`). Raises as `embed`."""
        return self._thread.run(self._pooling.classify(prompts, pooling_params, lora_request, use_tqdm))

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        chat_template: str | None = None,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """Return the score of pairs of texts (`outputs.score`): one text with each of several, or each text with its
        counterpart.

        An embedding model compares the angles of the texts' embeddings. A classifier with one label gets both texts in
        one prompt, joined by `chat_template` or the option of this name, which sees messages of the roles `query` and
        `document`; without a template the texts follow each other. Raises as `embed`.
        """
        scoring = self._pooling.score(data_1, data_2, pooling_params, lora_request, use_tqdm, chat_template)
        return self._thread.run(scoring)

    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        pooling_params: PoolingParamsLike = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoraLike = None,
        pooling_task: PoolingTask | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Return the vector of every prompt as an array (`outputs.data`): an embedding, or the classes'
        probabilities. `pooling_task`: embed or classify; None: the kind that the model is served for. Raises as
        `embed`."""
        encoding = self._pooling.encode(
            prompts, pooling_params, pooling_task, lora_request=lora_request, use_tqdm=use_tqdm
        )
        return self._thread.run(encoding)

    # Calls that concern the whole instance.

    pause_generation = _blocking(InstanceCalls.pause_generation)
    resume_generation = _blocking(InstanceCalls.resume_generation)
    sleep = _blocking(InstanceCalls.sleep)
    wake_up = _blocking(InstanceCalls.wake_up)
    release_kv_cache_memory = _blocking(InstanceCalls.release_kv_cache_memory)
    reset_prefix_cache = _blocking(InstanceCalls.reset_prefix_cache)
    init_weight_transfer_engine = _blocking(InstanceCalls.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = _blocking(InstanceCalls.shutdown_weight_transfer_engine)
    start_weight_update = _blocking(InstanceCalls.start_weight_update)
    update_weights = _blocking(InstanceCalls.update_weights)
    finish_weight_update = _blocking(InstanceCalls.finish_weight_update)
    abort_weight_update = _blocking(InstanceCalls.abort_weight_update)
    update_weight_version = _blocking(InstanceCalls.update_weight_version)
    get_weight_version = _blocking(InstanceCalls.get_weight_version)
    get_weight_info = _blocking(InstanceCalls.get_weight_info)
    is_paused = _blocking(InstanceCalls.is_paused)
    is_sleeping = _blocking(InstanceCalls.is_sleeping)
    scale = _blocking(InstanceCalls.scale)
    scale_elastic_ep = _blocking(InstanceCalls.scale_elastic_ep)
    restart_engines = _blocking(InstanceCalls.restart_engines)
    scaling_status = _blocking(InstanceCalls.scaling_status)
    add_lora = _blocking(InstanceCalls.add_lora)
    remove_lora = _blocking(InstanceCalls.remove_lora)
    list_loras = _blocking(InstanceCalls.list_loras)
    collective_rpc = _blocking(InstanceCalls.collective_rpc)

    # The instance.

    def get_tokenizer(self) -> Tokenizer:
        """Return the model's tokenizer. Raises `InvalidRequest` under `skip_tokenizer_init`."""
        return self._instance.tokenizer

    def get_world_size(self, include_dp: bool = True) -> int:
        """Return the number of workers, of all engines or of one."""
        num_engines = len(self._instance.client.ranks) if include_dp else 1
        return num_engines * self.config.parallel.world_size

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
