"""Functions that add a stage to a dataset."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec
import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from eagleray.client.answers.requested_tools import CHAT_TOOLS, read_tools
from eagleray.client.pooling import PoolingParams, PoolingTask
from eagleray.config.resolve import executor_name
from eagleray.config.sections import Config
from eagleray.data import reservation
from eagleray.data.columns import one_completion
from eagleray.data.conversations import Conversations
from eagleray.data.options import StageKeywords, split_options
from eagleray.data.outputs import ANSWER_PARTS, GENERATION, ROUTED_EXPERTS
from eagleray.data.stage_actor import StageActor
from eagleray.data.stages import GenerationStage, PoolingStage, ScoreStage, Stage, check_columns
from eagleray.engine_args import EngineArgs
from eagleray.errors import ConfigError, InvalidRequest
from eagleray.generation_calls import OneParams, as_params

DEFAULT_OUTPUTS = ("generated_text", "finish_reason", "num_prompt_tokens", "num_generated_tokens")

BLOCKS_AHEAD = 2
"""Number of blocks of an actor for each block of rows in flight: a block remains until its slowest row has finished,
and rows of other blocks fill the engines meanwhile."""


def generate(
    ds: Dataset,
    model: str | None = None,
    *,
    prompt_column: str = "prompt",
    messages_column: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tools_column: str | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    parallel_tool_calls: bool = True,
    sampling_params: OneParams | None = None,
    sampling_params_column: str | None = None,
    seed_column: str | None = None,
    lora_column: str | None = None,
    outputs: Sequence[str] = DEFAULT_OUTPUTS,
    **options: Unpack[StageKeywords],
) -> Dataset:
    """Return the dataset with the columns `outputs`, which the model generates. Lazy, as all transformations of Ray
    Data are.

    `prompt_column`: texts or lists of token ids. `messages_column`: conversations instead, which the model's chat
    template renders with `chat_template_kwargs`. Their answers may call `tools`, as those of `LLM.chat`, or the tools
    in `tools_column` (texts of JSON), where it is not null.

    `sampling_params`: those of all rows; by default the model's own. `sampling_params_column` (dictionaries),
    `seed_column` and `lora_column` (names of adapters, see the option `lora_modules`) change them for a row, where they
    are not null.

    `outputs`: names among generated_text, generated_token_ids, finish_reason, num_prompt_tokens, num_generated_tokens,
    prompt_token_ids, cumulative_logprob, logprobs and routed_experts, and of conversations content, reasoning and
    tool_calls, the parts of the text. `options`: those of `StageKeywords`.

    Raises `ConfigError` and `InvalidRequest` for wrong arguments, and `ClusterError` if the cluster can never hold the
    actors. A model that is missing or damaged ends the pipeline when it runs.
    """
    _check_outputs(outputs)
    conversations = None
    if messages_column is None:
        given = {
            "chat_template_kwargs": chat_template_kwargs,
            "tools": tools,
            "tools_column": tools_column,
            "tool_choice": tool_choice,
            "parallel_tool_calls": None if parallel_tool_calls else False,
        }
        _check_needs_no_messages(given, outputs)
    else:
        conversations = Conversations(
            column=messages_column,
            chat_template_kwargs=chat_template_kwargs,
            offered=read_tools(tools, CHAT_TOOLS),
            tools_column=tools_column,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
        )
        conversations.check()
    if ROUTED_EXPERTS in outputs:
        options["enable_return_routed_experts"] = True
    params = None if sampling_params is None else one_completion(as_params(sampling_params))
    stage = GenerationStage(
        prompt_column=prompt_column,
        conversations=conversations,
        sampling_params=params,
        sampling_params_column=sampling_params_column,
        seed_column=seed_column,
        lora_column=lora_column,
        outputs=tuple(outputs),
    )
    return _add_stage(ds, model, stage, options)


def embed(
    ds: Dataset,
    model: str | None = None,
    *,
    prompt_column: str = "prompt",
    pooling_params: PoolingParams | None = None,
    **options: Unpack[StageKeywords],
) -> Dataset:
    """Return the dataset with the column `embedding`, the vector of each prompt. Otherwise as `generate`."""
    return _add_pooling(ds, model, "embed", prompt_column, pooling_params, options)


def classify(
    ds: Dataset,
    model: str | None = None,
    *,
    prompt_column: str = "prompt",
    pooling_params: PoolingParams | None = None,
    **options: Unpack[StageKeywords],
) -> Dataset:
    """Return the dataset with the column `probs`, the probabilities of the classes. Otherwise as `generate`."""
    return _add_pooling(ds, model, "classify", prompt_column, pooling_params, options)


def score(
    ds: Dataset,
    model: str | None = None,
    *,
    query_column: str = "query",
    document_column: str = "document",
    **options: Unpack[StageKeywords],
) -> Dataset:
    """Return the dataset with the column `score`, that of a pair of texts, see `LLM.score`. Otherwise as `generate`."""
    return _add_stage(ds, model, ScoreStage(query_column=query_column, document_column=document_column), options)


def _add_pooling(
    ds: Dataset,
    model: str | None,
    task: PoolingTask,
    prompt_column: str,
    params: PoolingParams | None,
    options: StageKeywords,
) -> Dataset:
    if not isinstance(params, PoolingParams | None):
        raise InvalidRequest(
            f"`pooling_params` must be a `PoolingParams`, but got {type(params).__name__}", param="pooling_params"
        )
    stage = PoolingStage(task=task, prompt_column=prompt_column, params=params or PoolingParams())
    return _add_stage(ds, model, stage, options)


def _add_stage(ds: Dataset, model: str | None, stage: Stage, options: StageKeywords) -> Dataset:
    pool, engine_options = split_options(options)
    config = _with_executor(EngineArgs(model, **engine_options).parse())
    _check_schema(ds, stage)
    max_in_flight = 2 * config.scheduling.max_num_seqs * config.parallel.data_parallel_size
    num_blocks = BLOCKS_AHEAD * math.ceil(max_in_flight / pool.rows_per_block)
    least, greatest = pool.num_actors
    return ds.repartition(target_num_rows_per_block=pool.rows_per_block, strict=True).map_batches(
        StageActor,
        fn_constructor_args=(config, stage),
        fn_constructor_kwargs={
            "errors": pool.errors,
            "output_prefix": pool.output_prefix,
            "max_in_flight": max_in_flight,
        },
        batch_size=None,  # one call for each block, and so one output block, see `outputs`
        batch_format="pyarrow",
        udf_modifying_row_count=False,
        compute=ActorPoolStrategy(
            min_size=least,
            max_size=greatest,
            max_tasks_in_flight_per_actor=num_blocks,
            max_concurrent_calls_per_actor=num_blocks,
            enable_true_multi_threading=True,
        ),
        **reservation.reserve(
            config, pool.actor_options, least, has_checkpoint=ds.context.checkpoint_config is not None
        ),
    )


def _check_schema(ds: Dataset, stage: Stage) -> None:
    """Raise `ConfigError` if the dataset lacks a column of the stage or has one of several types, as far as that is
    known before it is executed."""
    try:
        schema = ds.schema(fetch_if_missing=False)
    except pa.ArrowException as error:
        raise ConfigError(
            f"a column of the dataset has values of several types ({error}): convert it to one type before the stage"
        ) from None
    if schema is not None:
        check_columns(stage, schema.names)


def _with_executor(config: Config) -> Config:
    """Return the configuration with the executor that an instance outside of a placement group chooses: the group of
    an actor, if it is in one, holds the actor alone."""
    execution = msgspec.structs.replace(config.execution, executor=executor_name(config, in_placement_group=False))
    return msgspec.structs.replace(config, execution=execution)


def _check_needs_no_messages(given: Mapping[str, Any], outputs: Sequence[str]) -> None:
    names = [name for name, value in given.items() if value is not None]
    names += [name for name in outputs if name in ANSWER_PARTS]
    if names:
        raise ConfigError(f"`{names[0]}` is for conversations: name their column in `messages_column`")


def _check_outputs(outputs: Sequence[str]) -> None:
    if isinstance(outputs, str) or not outputs:
        raise ConfigError(f"`outputs` must be a list of names of columns, but it is {outputs!r}")
    if unknown := [name for name in outputs if name not in GENERATION]:
        raise ConfigError(f"`outputs` has no column {unknown[0]!r}: take some of {', '.join(GENERATION)}")
