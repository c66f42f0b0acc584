"""/generate: texts or token ids, continued, with the fields of SGLang. Each prompt of a batch is a request of its own.

As in SGLang, the model's generation_config.json does not change sampling parameters that the body leaves out, and each
event of a stream shows everything so far.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from eagleray.client.outputs import CompletionDelta, CompletionOutput
from eagleray.client.preprocess import Prompt
from eagleray.errors import InvalidRequest
from eagleray.messages.arrays import Array
from eagleray.messages.grammars import PARAM
from eagleray.messages.membership import RoutingInfo
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.server.endpoint import Endpoint, Operation
from eagleray.server.fields import routing_headers
from eagleray.server.generation import Generation, GenerationGroup, GenerationTask
from eagleray.server.generation_route import ParsedRequest
from eagleray.server.http_responses import Emit, EventStream, json_response, unless_disconnected
from eagleray.server.logprobs import slices
from eagleray.server.service import Service
from eagleray.server.sglang.completions import MetaInfo, SGLangCompletion, finish_reason
from eagleray.server.sglang.logprobs import EntryFormat, GrowingList, SGLangLogprobs
from eagleray.server.sglang.requests import SGLangGenerateRequest, SGLangPrompt, SGLangSampling, split_batch

DEFAULT_MAX_NEW_TOKENS = 128

OUR_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "no_stop_trim": "include_stop_str_in_output",
    **{
        name: name
        for name in (
            "stop",
            "stop_token_ids",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "logit_bias",
            "n",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "stream_interval",
        )
    },
}
"""Field of SGLang's sampling parameters → field of `SamplingParams`."""

CONSTRAINTS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""Field of SGLang's sampling parameters → field of `StructuredOutputsParams`."""

FIELD_NAMES = {ours: f"sampling_params.{name}" for name, ours in OUR_NAMES.items()} | {
    "prompt": "input_ids",
    "logprobs": "top_logprobs_num",
    "prompt_logprobs": "logprob_start_len",
    "logprob_token_ids": "token_ids_logprob",
    "routed_experts_prompt_start": "routed_experts_start_len",
    **{name: f"sampling_params.{name}" for name in CONSTRAINTS},
}


class SGLangGenerateRoute:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._body = service.body_decoder(SGLangGenerateRequest)

    def endpoints(self) -> list[Endpoint]:
        generate = Operation(
            self.generate,
            "Continue texts or token ids.",
            request_body=SGLangGenerateRequest,
            response=SGLangCompletion | list[SGLangCompletion],
            stream_event=SGLangCompletion,
            headers=routing_headers(),
            error_statuses=(400, 404, 413, 429, 500, 503, 504),
        )
        return [Endpoint("/generate", post=generate)]

    async def generate(self, request: Request) -> ASGIApp:
        body = await self._body.read(request)
        self._service.find_model(body.model)
        self._service.check_open()
        request_id = request.scope["state"]["request_id"]
        prompts, is_batch = split_batch(body, request_id)
        parsed = [ParsedSGLangPrompt(self._service, prompt, request) for prompt in prompts]
        self._service.admission.check_count(sum(one.task.params.n for one in parsed), 1)
        is_list = is_batch or parsed[0].task.params.n > 1
        if body.stream:
            return EventStream(lambda emit: _stream_all(parsed, emit, is_list=is_list), request_id)
        completions = await unless_disconnected(request.receive, _respond_all(parsed))
        return json_response(completions if is_list else completions[0])


def _constraint(fields: SGLangSampling) -> StructuredOutputsParams | None:
    """Return the constraint of the text. Raises `InvalidRequest` if there are several."""
    given = {name: text for name in CONSTRAINTS if (text := getattr(fields, name)) is not None}
    if len(given) > 1:
        names = " and ".join(f"`sampling_params.{name}`" for name in given)
        raise InvalidRequest(f"{names} both constrain the text: give one of them", param=next(iter(given)))
    return StructuredOutputsParams(**{CONSTRAINTS[name]: text for name, text in given.items()}) if given else None


async def _respond_all(parsed: Sequence[ParsedSGLangPrompt]) -> list[SGLangCompletion]:
    """Return the completions of all prompts, in order."""
    if len(parsed) == 1:
        return list(await parsed[0].respond())
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one.respond()) for one in parsed]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [completion for task in tasks for completion in task.result()]


async def _stream_all(parsed: Sequence[ParsedSGLangPrompt], emit: Emit, *, is_list: bool) -> None:
    """Emit the events of all prompts as they come."""
    lock = asyncio.Lock()

    async def stream(one: ParsedSGLangPrompt, first_index: int) -> None:
        async def emit_numbered(completion: SGLangCompletion) -> None:
            if is_list:
                assert completion.index is not UNSET
                completion.index += first_index
            else:
                completion.index = UNSET
            async with lock:  # an event is written whole before the next one
                await emit(completion)

        await one.stream(emit_numbered)

    first_index = 0
    try:
        async with asyncio.TaskGroup() as group:
            for one in parsed:
                group.create_task(stream(one, first_index))
                first_index += one.task.params.n
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


class StreamedCompletion:
    """Content of the events of one completion so far."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0
        self.token_ids = GrowingList()
        self.logprobs = {name: GrowingList() for name in SGLangLogprobs.__struct_fields__}
        self.routed_experts: list[Array] = []


class ParsedSGLangPrompt(ParsedRequest[SGLangPrompt, SGLangCompletion]):
    path = "/generate"
    summary = "Continue texts or token ids."
    body_type = SGLangPrompt
    response_type = list[SGLangCompletion]
    chunk_type = SGLangCompletion
    logprobs_type = SGLangLogprobs
    can_show_usage = False
    field_names = FIELD_NAMES

    def _make_task(self, request: Request) -> GenerationTask:
        body, service = self.body, self.service
        self._streamed: defaultdict[int, StreamedCompletion] = defaultdict(StreamedCompletion)
        self._input_logprobs: dict[str, Any] = {}
        task = super()._make_task(request)._replace(request_id=body.rid)
        if body.rank is not None:
            if body.rank not in service.ranks:
                raise InvalidRequest(f"there is no engine of rank {body.rank} here", param="routed_dp_rank")
            task = task._replace(options={**task.options, "rank": body.rank})
        return task

    def _constraint_names(self) -> Mapping[str, str]:
        given = [name for name in CONSTRAINTS if getattr(self.body.sampling, name) is not None]
        return {PARAM: f"sampling_params.{given[0]}"} if given else {}

    def _sampling_params(self) -> SamplingParams:
        body, fields, service = self.body, self.body.sampling, self.service
        given: dict[str, Any] = {
            ours: value for name, ours in OUR_NAMES.items() if (value := getattr(fields, name)) not in (None, UNSET)
        }
        if fields.max_new_tokens in (0, UNSET):
            self.only_prompt = fields.max_new_tokens == 0
            given["max_tokens"] = 1 if self.only_prompt else DEFAULT_MAX_NEW_TOKENS
        else:
            given["max_tokens"] = fields.max_new_tokens
        self._check_logprobs()
        given["structured_outputs"] = _constraint(fields)
        if body.return_logprob:
            given["logprobs"] = body.top_logprobs_num
            given["logprob_token_ids"] = body.token_ids_logprob
            if body.logprob_start_len >= 0:
                given["prompt_logprobs"] = body.top_logprobs_num
        if isinstance(body.prompt, str) or body.return_text_in_logprobs:
            service.check_tokenizer()
        self._entries = EntryFormat(
            top=body.top_logprobs_num,
            asked=body.token_ids_logprob or (),
            tokenizer=service.tokenizer if body.return_text_in_logprobs else None,
        )
        return SamplingParams(
            detokenize=service.client.tokenizer is not None,
            return_routed_experts=body.return_routed_experts,
            routed_experts_prompt_start=body.routed_experts_start_len,
            **given,
        )

    def _check_logprobs(self) -> None:
        """Raise `InvalidRequest` for fields that would have no effect."""
        body = self.body
        if not body.return_logprob and (body.top_logprobs_num or body.token_ids_logprob or body.logprob_start_len >= 0):
            raise InvalidRequest(
                "`logprob_start_len`, `top_logprobs_num` and `token_ids_logprob` need `return_logprob`",
                param="return_logprob",
            )
        if body.token_ids_logprob and body.logprob_start_len >= 0:
            raise InvalidRequest(
                "`token_ids_logprob` is for generated tokens: leave `logprob_start_len` out", param="token_ids_logprob"
            )

    async def make_prompts(self) -> list[Prompt]:
        prompt = self.body.prompt
        if isinstance(prompt, list):
            return [Prompt(token_ids=prompt)]
        return [Prompt(prompt, await self.service.text.encode(prompt, add_special_tokens=True))]

    # The whole answer.

    def _logprobs(self, generation: Generation, delta: CompletionDelta) -> SGLangLogprobs:
        return self._entries.format(delta.token_ids, delta.logprobs or ())

    async def _choice(
        self, generation: Generation, output: CompletionOutput, logprobs: SGLangLogprobs | None
    ) -> SGLangCompletion:
        completion = SGLangCompletion(
            text=output.text, output_ids=output.token_ids, meta_info=self._meta_info(generation, output)
        )
        if logprobs is not None:
            self._show_logprobs(completion.meta_info, logprobs)
        self._show_routed_experts(completion.meta_info, output.routed_experts)
        await self._read_prompt(generation)
        self._show_prompt(completion.meta_info)
        return completion

    async def _response(self, group: GenerationGroup, choices: list[SGLangCompletion]) -> list[SGLangCompletion]:
        for completion in choices:
            completion.meta_info.cached_tokens = group.prompt_details.cached_tokens
        return choices

    # The events of a stream.

    def _chunks(self, generation: Generation, delta: CompletionDelta) -> list[SGLangCompletion]:
        return [] if self._is_empty(delta) else [self._chunk(generation, delta)]

    def _chunk(self, generation: Generation, delta: CompletionDelta) -> SGLangCompletion:
        so_far = self._streamed[delta.index]
        so_far.text += delta.text
        so_far.num_tokens += len(delta.token_ids)
        so_far.token_ids.extend(delta.token_ids)
        meta_info = self._meta_info(generation, delta)
        if delta.logprobs is not None:
            logprobs = self._logprobs(generation, delta)
            for name, entries in so_far.logprobs.items():
                entries.extend(getattr(logprobs, name))
        if self.task.has_logprobs:
            shown = {name: entries.value for name, entries in so_far.logprobs.items()}
            self._show_logprobs(meta_info, SGLangLogprobs(**shown))
        if delta.routed_experts is not None:
            so_far.routed_experts.append(delta.routed_experts)
        if delta.finish_reason is not None and so_far.routed_experts:
            self._show_routed_experts(meta_info, np.concatenate(so_far.routed_experts))
        self._show_prompt(meta_info)
        return SGLangCompletion(
            text=so_far.text, output_ids=so_far.token_ids.value, meta_info=meta_info, index=delta.index
        )

    async def _first_chunks(self, generation: Generation, delta: CompletionDelta) -> AsyncIterator[SGLangCompletion]:
        await self._read_prompt(generation)
        yield self._chunk(generation, delta)

    def _make_chunk(self, choices: list[Any]) -> SGLangCompletion:
        raise AssertionError("events have one completion each")

    # Parts of both.

    def _meta_info(self, generation: Generation, part: CompletionOutput | CompletionDelta) -> MetaInfo:
        is_last = part.finish_reason is not None
        num_tokens = len(part.token_ids)
        if isinstance(part, CompletionDelta):
            num_tokens = self._streamed[part.index].num_tokens
        meta_info = MetaInfo(
            id=self.body.rid,
            finish_reason=finish_reason(part, num_tokens) if is_last else None,
            prompt_tokens=len(generation.prompt_token_ids),
            completion_tokens=num_tokens,
            cached_tokens=0,
            weight_version=self.service.client.state.weight_version,
        )
        if self.streamed_details is not None:
            meta_info.cached_tokens = self.streamed_details.cached_tokens
        if part.weight_versions:
            meta_info.weight_versions = part.weight_versions
            meta_info.weight_version = part.weight_versions[-1].version
        if is_last:
            meta_info.e2e_latency = time.perf_counter() - self.task.arrival
        return meta_info

    def _show_logprobs(self, meta_info: MetaInfo, logprobs: SGLangLogprobs) -> None:
        meta_info.output_token_logprobs = logprobs.tokens
        if self.body.top_logprobs_num:
            meta_info.output_top_logprobs = logprobs.top
        if self.body.token_ids_logprob:
            meta_info.output_token_ids_logprobs = logprobs.asked

    def _show_routed_experts(self, meta_info: MetaInfo, rows: Array | None) -> None:
        if rows is None:
            return
        info = self.service.client.engine_info
        whole = _of_all_layers(rows, None if info is None else info.routing)
        meta_info.routed_experts = base64.b64encode(whole.tobytes()).decode()
        if start := self.body.routed_experts_start_len:
            meta_info.routed_experts_start_len = start

    async def _read_prompt(self, generation: Generation) -> None:
        """Format the log-probabilities of the prompt, if they were requested."""
        body = self.body
        if not body.return_logprob or self._input_logprobs:
            return
        tokens, top = GrowingList(), GrowingList()
        if (positions := generation.prompt_logprobs) is not None:
            first = min(body.logprob_start_len, len(positions))
            for start, end in slices(len(positions) - first, body.top_logprobs_num):
                part = slice(first + start, first + end)
                logprobs = self._entries.format(generation.prompt_token_ids[part], positions[part])
                tokens.extend(logprobs.tokens)
                top.extend(logprobs.top)
                await asyncio.sleep(0)
        self._input_logprobs["input_token_logprobs"] = tokens.value
        if body.top_logprobs_num:
            self._input_logprobs["input_top_logprobs"] = top.value

    def _show_prompt(self, meta_info: MetaInfo) -> None:
        for name, entries in self._input_logprobs.items():
            setattr(meta_info, name, entries)


def _of_all_layers(rows: Array, routing: RoutingInfo | None) -> Array:
    """Return routed experts as int32 of all layers of the model, with zeros for those that have no experts."""
    if routing is None or len(routing.layers) != rows.shape[1]:
        return rows.astype("<i4")
    whole = np.zeros((rows.shape[0], routing.num_model_layers, rows.shape[2]), "<i4")
    whole[:, list(routing.layers)] = rows
    return whole
