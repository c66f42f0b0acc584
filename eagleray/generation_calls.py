"""Requests of `LLM` that generate: one for each prompt, sent together, with wrong or failed ones named.

Driven by its methods, in the loop of the instance.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

import msgspec

from eagleray.client.answers.divide import divide_answer
from eagleray.client.answers.plan import AnswerPlan
from eagleray.client.outputs import RequestOutput
from eagleray.client.request import RequestStream
from eagleray.config.suggestions import suggest
from eagleray.errors import InvalidRequest
from eagleray.instance import LocalInstance
from eagleray.lora import LoraLike, LoraRequests
from eagleray.messages.sampling import RequestOutputKind, SamplingParams
from eagleray.progress import Progress
from eagleray.prompts import PromptLike, as_prompts, one_for_each
from eagleray.row_errors import ROW_ERRORS, RequestError, name_row
from eagleray.streaming import OutputCollector, OutputOrError

OneParams = SamplingParams | Mapping[str, Any]
ParamsLike = OneParams | Sequence[OneParams] | None
ErrorsMode = Literal["raise", "return"]
PromptsLike = PromptLike | Iterable[PromptLike]
Sent = tuple[RequestStream, RequestOutputKind]


class PromptBatch(NamedTuple):
    """Prompts that are sent together."""

    start: int
    """Index of the first one, for errors and outputs."""
    prompts: Sequence[PromptLike]
    params: ParamsLike
    priority: int | Sequence[int] | None
    lora_request: LoraLike


class PromptBatches:
    """Divides prompts, which may be an iterator, with their arguments.

    Raises `InvalidRequest` if a list of arguments has another length than a list of prompts.
    """

    def __init__(
        self,
        prompts: PromptsLike,
        params: ParamsLike,
        priority: int | Sequence[int] | None,
        lora_request: LoraLike,
    ) -> None:
        self._params, self._priority, self._lora_request = params, priority, lora_request
        self._start = 0
        self.num_prompts: int | None = None
        """Number of all prompts; None for an iterator."""
        if isinstance(prompts, str | Mapping | Sequence):
            several = as_prompts(prompts)
            self.num_prompts = len(several)
            self._prompts = iter(several)
            one_for_each(None if isinstance(params, Mapping) else params, len(several), "sampling_params")
            one_for_each(priority, len(several), "priority")
            one_for_each(lora_request, len(several), "lora_request")
        else:
            self._prompts = iter(prompts)

    def next(self, size: int) -> PromptBatch | None:
        """Return the next prompts, at most `size`; None at the end."""
        start, prompts = self._start, list(islice(self._prompts, size))
        self._start = end = start + len(prompts)
        params, priority, lora_request = self._params, self._priority, self._lora_request
        if not prompts:
            return None
        return PromptBatch(
            start,
            prompts,
            params[start:end] if isinstance(params, Sequence) else params,
            priority[start:end] if isinstance(priority, Sequence) else priority,
            lora_request[start:end] if isinstance(lora_request, Sequence) else lora_request,
        )


class GenerationCalls:
    """The requests of one instance."""

    def __init__(self, instance: LocalInstance, loras: LoraRequests) -> None:
        self._instance = instance
        self._loras = loras

    async def complete(self, batch: PromptBatch, errors: ErrorsMode, use_tqdm: bool) -> list[OutputOrError]:
        """Return the whole output of every prompt, or a `RequestError` in its place, in the order of the prompts."""
        return await self.finish(await self.send(batch, errors=errors), errors, use_tqdm)

    async def finish(
        self, sent: Sequence[Sent | RequestError], errors: ErrorsMode, use_tqdm: bool
    ) -> list[OutputOrError]:
        """Wait for the outputs of requests, in their order. If it fails or is cancelled, none keeps running."""
        try:
            with Progress("prompts", len(sent), is_shown=use_tqdm) as progress:
                work = [self._result(index, one, errors, progress, len(sent) > 1) for index, one in enumerate(sent)]
                return await self._instance.guard(_gather(work))
        finally:
            abort_all(sent)

    async def add(
        self,
        collector: OutputCollector,
        batch: PromptBatch,
        *,
        errors: ErrorsMode,
        kind: RequestOutputKind | None = RequestOutputKind.FINAL_ONLY,
    ) -> None:
        """Send requests, and have `collector` read their outputs. `kind`: see `send`."""
        sent = await self.send(batch, errors=errors, kind=kind)
        collector.add(dict(enumerate(sent, batch.start)))

    async def send(
        self, batch: PromptBatch, *, errors: ErrorsMode, kind: RequestOutputKind | None = None
    ) -> list[Sent | RequestError]:
        """Send a request for each prompt. A wrong one is an error in its place or, under `errors` raise, has none sent.

        `kind`: content of the outputs; None: as the parameters say.
        """
        if errors not in ("raise", "return"):
            raise InvalidRequest(f"`errors` must be raise or return, but it is {errors!r}", param="errors")
        count = len(batch.prompts)
        given = self._instance.default_sampling_params() if batch.params is None else batch.params
        all_params = [given] * count if isinstance(given, Mapping) else one_for_each(given, count, "sampling_params")
        priorities = one_for_each(batch.priority or 0, count, "priority")
        requests = one_for_each(batch.lora_request, count, "lora_request")
        adapters = [await self._loras.find(request) for request in requests]
        sent: list[Sent | RequestError] = []
        rows = zip(batch.prompts, all_params, priorities, adapters, strict=True)
        try:
            for index, (prompt, own, priority, adapter) in enumerate(rows, batch.start):
                try:
                    params = as_params(own)
                    stream = self._instance.generate(prompt, params, priority=priority, adapter=adapter)
                except ROW_ERRORS as error:
                    if errors == "raise":
                        raise name_row(error, index, is_one_of_several=index > 0 or count > 1) from None
                    sent.append(RequestError(index, error))
                else:
                    sent.append((stream, kind or params.output_kind))
        except BaseException:
            abort_all(sent)
            raise
        return sent

    async def _result(
        self,
        index: int,
        one: Sent | RequestError,
        errors: ErrorsMode,
        progress: Progress,
        is_one_of_several: bool,
    ) -> OutputOrError:
        result: OutputOrError
        if isinstance(one, RequestError):
            result = one
        else:
            try:
                result = await one[0].result()
            except ROW_ERRORS as error:
                if errors == "raise":
                    raise name_row(error, index, is_one_of_several=is_one_of_several) from None
                result = RequestError(index, error)
        if isinstance(result, RequestOutput):
            progress.add_tokens(
                len(result.prompt_token_ids or ()), sum(len(output.token_ids) for output in result.outputs)
            )
        progress.finish(failed=isinstance(result, RequestError))
        return result


def as_params(given: OneParams) -> SamplingParams:
    """Return parameters that may be a dictionary. Raises `InvalidRequest` for other types and unknown names."""
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise InvalidRequest(
            f"sampling parameters are a `SamplingParams` or a dictionary of its fields, but got {type(given).__name__}",
            param="sampling_params",
        )
    if unknown := given.keys() - SamplingParams.__struct_fields__:
        name = min(unknown)
        meant = suggest(name, SamplingParams.__struct_fields__, {})
        hint = f"; did you mean `{meant}`?" if meant else ""
        raise InvalidRequest(f"sampling parameters have no field {name!r}{hint}", param="sampling_params")
    return SamplingParams(**given)


def plan_params(given: ParamsLike, plan: AnswerPlan, instance: LocalInstance) -> ParamsLike:
    """Add the parameters that the answers of this plan need to those of `generate`. Raises `InvalidRequest`."""
    if not plan.is_divided:
        return given
    if given is None:
        given = instance.default_sampling_params()
    if isinstance(given, SamplingParams | Mapping):
        return plan_one(as_params(given), plan, instance)
    return [plan_one(as_params(one), plan, instance) for one in given]


def plan_one(params: SamplingParams, plan: AnswerPlan, instance: LocalInstance) -> SamplingParams:
    """Return the parameters of an answer of this plan. Raises `InvalidRequest`."""
    if not plan.is_divided:
        return params
    return msgspec.structs.replace(params, **plan.sampling_fields(params.structured_outputs, instance.tokenizer))


def divide_output(plan: AnswerPlan, output: RequestOutput) -> None:
    """Set the parts of the answers to a conversation, whose prompt is a text."""
    for answer in output.outputs:
        answer.reasoning, answer.content, answer.tool_calls = divide_answer(plan, output.prompt or "", answer.text)


def abort_all(sent: Iterable[Sent | RequestError]) -> None:
    """Abort the requests that still run."""
    for one in sent:
        if not isinstance(one, RequestError):
            one[0].abort()


def all_prompts(prompts: PromptsLike) -> Sequence[PromptLike]:
    """Return a list of prompts, given one, several, or an iterator, which is read to its end."""
    return as_prompts(prompts if isinstance(prompts, str | Mapping | Sequence) else list(prompts))


async def _gather(work: Sequence[Coroutine[Any, Any, OutputOrError]]) -> list[OutputOrError]:
    return await asyncio.gather(*work)
