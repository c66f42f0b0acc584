"""Stages as values: the columns that a stage reads and adds, and the computation of a row.

A stage is made in the driver and sent to the stage's actors, where `open` connects it to their engines.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.pooling import PoolingParams, PoolingTask, check_pooling, check_scorer
from eagleray.config.lora_modules import lora_modules
from eagleray.config.pooling_spec import GENERATES_ONLY, POOLS_ONLY
from eagleray.data.columns import Row, adapter_of, messages_of, params_of, prompt_of, text_of, tools_of
from eagleray.data.conversations import ConversationPrompt, Conversations
from eagleray.data.outputs import GENERATION, ROUTED_EXPERTS
from eagleray.errors import ConfigError, InvalidRequest
from eagleray.generation_calls import divide_output, plan_one
from eagleray.instance import LocalInstance
from eagleray.lora import LoRARequest, LoraRequests
from eagleray.messages.membership import EngineInfo
from eagleray.messages.sampling import SamplingParams
from eagleray.pooling_calls import PoolingCalls
from eagleray.prompts import PromptLike

ComputeRow = Callable[[Row], Awaitable[dict[str, Any]]]
"""Returns the values of a row's new columns. Raises one of `ROW_ERRORS` for a row that is wrong or fails."""


class Stage(Protocol):
    """A stage of a pipeline."""

    @property
    def inputs(self) -> dict[str, str]:
        """Names of the columns that are read, by the parameters that set them."""

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the columns that are added, without the prefix."""

    def open(self, instance: LocalInstance) -> ComputeRow:
        """Return the function that computes rows, which is called in the loop of the instance. Raises `InvalidRequest`
        if the model is of another kind."""


@dataclass(frozen=True, kw_only=True)
class GenerationStage:
    """Completes prompts or answers conversations."""

    prompt_column: str
    conversations: Conversations | None
    """Conversations in place of the prompts in `prompt_column`."""
    sampling_params: SamplingParams | None
    """None: the model's own."""
    sampling_params_column: str | None
    seed_column: str | None
    lora_column: str | None
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> dict[str, str]:
        prompts = {"prompt_column": self.prompt_column} if self.conversations is None else self.conversations.inputs
        columns = {
            **prompts,
            "sampling_params_column": self.sampling_params_column,
            "seed_column": self.seed_column,
            "lora_column": self.lora_column,
        }
        return {parameter: name for parameter, name in columns.items() if name is not None}

    def open(self, instance: LocalInstance) -> ComputeRow:
        if _engine_info(instance).pooling is not None:
            raise InvalidRequest(POOLS_ONLY, param="model")
        if self.conversations is not None:
            self.conversations.check(instance)
        loras = LoraRequests(instance.client, instance.control)
        own = self._with_outputs(self.sampling_params or instance.default_sampling_params())
        defaults = {name: getattr(own, name) for name in own.__struct_fields__}
        have_same_params = self.sampling_params_column is None and self.seed_column is None
        adapters = {name: LoRARequest(name, number) for number, name in enumerate(lora_modules(instance.config), 1)}

        async def compute(row: Row) -> dict[str, Any]:
            params = own
            if not have_same_params:
                changed = params_of(row, defaults, column=self.sampling_params_column, seed=self.seed_column)
                params = self._with_outputs(changed)
            name = adapter_of(row, self.lora_column, adapters)
            adapter = None if name is None else await loras.find(adapters[name])
            prompt, plan = self._prompt(row, instance)
            stream = instance.generate(prompt, plan_one(params, plan, instance), adapter=adapter)
            try:
                output = await stream.result()
            finally:
                stream.abort()
            divide_output(plan, output)
            return {name: GENERATION[name].value(output) for name in self.outputs}

        return compute

    def _prompt(self, row: Row, instance: LocalInstance) -> ConversationPrompt:
        if (conversations := self.conversations) is None:
            return ConversationPrompt(prompt_of(row, self.prompt_column), AnswerPlan())
        tools = None if conversations.tools_column is None else tools_of(row, conversations.tools_column)
        return conversations.prompt(messages_of(row, conversations.column), tools, instance)

    def _with_outputs(self, params: SamplingParams) -> SamplingParams:
        """Have the engine report what the columns need, and no routed experts otherwise."""
        params.return_routed_experts = ROUTED_EXPERTS in self.outputs
        if params.logprobs is None and not {"logprobs", "cumulative_logprob"}.isdisjoint(self.outputs):
            params.logprobs = 0
        return params


@dataclass(frozen=True, kw_only=True)
class PoolingStage:
    """Embeds or classifies prompts."""

    task: PoolingTask
    prompt_column: str
    params: PoolingParams

    @property
    def inputs(self) -> dict[str, str]:
        return {"prompt_column": self.prompt_column}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("embedding" if self.task == "embed" else "probs",)

    def open(self, instance: LocalInstance) -> ComputeRow:
        check_pooling(self.params, _engine_info(instance), self.task)
        calls = PoolingCalls(instance, LoraRequests(instance.client, instance.control))
        (name,) = self.outputs

        async def compute(row: Row) -> dict[str, Any]:
            prompts: list[PromptLike] = [prompt_of(row, self.prompt_column)]
            (output,) = await calls.encode(prompts, self.params, self.task)
            return {name: output.outputs.data}

        return compute


@dataclass(frozen=True, kw_only=True)
class ScoreStage:
    """Scores pairs of texts."""

    query_column: str
    document_column: str

    @property
    def inputs(self) -> dict[str, str]:
        return {"query_column": self.query_column, "document_column": self.document_column}

    @property
    def outputs(self) -> tuple[str, ...]:
        return ("score",)

    def open(self, instance: LocalInstance) -> ComputeRow:
        pooling = _engine_info(instance).pooling
        if pooling is None:
            raise InvalidRequest(GENERATES_ONLY, param="model")
        check_scorer(pooling)
        calls = PoolingCalls(instance, LoraRequests(instance.client, instance.control))

        async def compute(row: Row) -> dict[str, Any]:
            query, document = text_of(row, self.query_column), text_of(row, self.document_column)
            (output,) = await calls.score(query, document, None, None, use_tqdm=False, chat_template=None)
            return {"score": output.outputs.score}

        return compute


def check_columns(stage: Stage, columns: Sequence[str]) -> None:
    """Raise `ConfigError` if the stage reads a column that is not among `columns`, which are those of the dataset."""
    for parameter, name in stage.inputs.items():
        if name not in columns:
            raise ConfigError(
                f"the dataset has no column {name!r}: set `{parameter}` to one of its columns, which are "
                f"{', '.join(columns)}"
            )


def _engine_info(instance: LocalInstance) -> EngineInfo:
    info = instance.client.engine_info
    assert info is not None, "a stage is opened once the instance serves"
    return info
