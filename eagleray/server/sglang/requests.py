"""The body of /generate, and its division into requests of one prompt each."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import MAX_STOP_STRINGS
from eagleray.server.body import Empty, EmptyObject, Null
from eagleray.server.fields import LogitBias, StopTokenIds, StreamOptions, Temperature, Timeout
from eagleray.server.routed_experts import RoutedExpertsFormat

T = TypeVar("T")

REQUEST_NAME = re.compile(r"[\x21-\x7e]{1,128}")


class SGLangSampling(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters with the names and defaults of SGLang; null means the default."""

    max_new_tokens: Annotated[
        int | UnsetType | None,
        Meta(description="Default 128; null: up to the model's length; 0: the prompt alone."),
    ] = UNSET
    min_new_tokens: int | None = None
    stop: Annotated[str | list[str] | None, Meta(extra_json_schema={"maxItems": MAX_STOP_STRINGS})] = None
    stop_token_ids: StopTokenIds = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: Annotated[int | None, Meta(description="-1: all tokens.")] = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    n: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[
        bool | None, Meta(description="No effect: the tokenizer's own decoder decides about spaces.")
    ] = None
    no_stop_trim: Annotated[bool | None, Meta(description="Keep the stop string in the text.")] = None
    sampling_seed: int | None = None
    stream_interval: int | None = None
    json_schema: Annotated[str | None, Meta(description="JSON schema of the text, as JSON.")] = None
    regex: Annotated[str | None, Meta(description="Regular expression of the text.")] = None
    ebnf: Annotated[str | None, Meta(description="Grammar of the text.")] = None
    structural_tag: Annotated[str | None, Meta(description="Structural tag of the text, as JSON.")] = None
    stop_regex: Null = None
    custom_params: EmptyObject = None


class SGLangGenerateRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Continue one prompt or several. With several, lists have an entry for each."""

    rid: Annotated[
        str | list[str] | None, Meta(description="Id for /abort_request. Default: the one of header X-Request-Id.")
    ] = None
    text: str | list[str] | None = None
    input_ids: Annotated[
        list[int | list[int]] | None, Meta(description="Token ids of one prompt, or a list of them.")
    ] = None
    sampling_params: SGLangSampling | list[SGLangSampling] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Annotated[
        int | list[int] | None,
        Meta(description="First position of the prompt whose log-probability is reported; -1 (default): none."),
    ] = None
    top_logprobs_num: Annotated[
        int | list[int] | None, Meta(description="Also report this many likeliest tokens at every position.")
    ] = None
    token_ids_logprob: Annotated[
        list[int | list[int]] | None, Meta(description="Also report these tokens at every generated position.")
    ] = None
    return_text_in_logprobs: bool | None = None
    stream: Annotated[bool | None, Meta(description="Events, each with everything so far.")] = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int | None, Meta(description="First position to report.")] = None
    session_id: Annotated[str | None, Meta(description="Requests of a session go to the same engine.")] = None
    routed_dp_rank: Annotated[int | None, Meta(description="Rank of the engine that the request must go to.")] = None
    data_parallel_rank: Annotated[int | None, Meta(description="Another name of `routed_dp_rank`.")] = None
    priority: int | None = None
    cache_salt: str | None = None
    model: str | None = None
    lora_path: Annotated[
        str | list[str | None] | None, Meta(description="Name of an adapter that is loaded, or a list of them.")
    ] = None
    timeout: Timeout | None = None
    log_metrics: Annotated[bool | None, Meta(description="No effect.")] = None
    image_data: Empty = None
    video_data: Empty = None
    audio_data: Empty = None
    input_embeds: Null = None
    session_params: Null = None
    custom_logit_processor: Null = None


class SGLangPrompt(msgspec.Struct, kw_only=True):
    """A request of one prompt."""

    prompt: str | list[int]
    rid: str
    sampling: SGLangSampling
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    return_text_in_logprobs: bool
    return_routed_experts: bool
    routed_experts_start_len: int
    session_id: str | None
    rank: int | None

    model: str | None
    stream: bool | None
    priority: int | None
    cache_salt: str | None
    timeout: float | None
    stream_options: StreamOptions | None
    routed_experts_format: RoutedExpertsFormat | None = None


def split_batch(body: SGLangGenerateRequest, request_id: str) -> tuple[list[SGLangPrompt], bool]:
    """Return the requests in `body`, and whether it is a batch. `request_id`: id of the HTTP request.

    Raises `InvalidRequest`.
    """
    prompts, is_batch = _prompts(body)
    num = len(prompts)
    names = _request_names(body.rid, request_id, num, is_batch=is_batch)
    sampling = _for_each(body.sampling_params, num, "sampling_params")
    return_logprob = _for_each(body.return_logprob, num, "return_logprob")
    starts = _for_each(body.logprob_start_len, num, "logprob_start_len")
    top = _for_each(body.top_logprobs_num, num, "top_logprobs_num")
    adapters: Sequence[str | None] = _for_each(body.lora_path, num, "lora_path")
    asked = _asked_token_ids(body.token_ids_logprob, num)
    return [
        SGLangPrompt(
            prompt=prompts[index],
            rid=names[index],
            sampling=sampling[index] or SGLangSampling(),
            return_logprob=bool(return_logprob[index]),
            logprob_start_len=_or_default(starts[index], -1),
            top_logprobs_num=top[index] or 0,
            token_ids_logprob=asked[index],
            return_text_in_logprobs=bool(body.return_text_in_logprobs),
            return_routed_experts=bool(body.return_routed_experts),
            routed_experts_start_len=body.routed_experts_start_len or 0,
            session_id=body.session_id,
            rank=body.routed_dp_rank if body.routed_dp_rank is not None else body.data_parallel_rank,
            model=adapters[index] or body.model,
            stream=body.stream,
            priority=body.priority,
            cache_salt=body.cache_salt,
            timeout=body.timeout,
            stream_options=None,
        )
        for index in range(num)
    ], is_batch


def _prompts(body: SGLangGenerateRequest) -> tuple[Sequence[str | list[int]], bool]:
    """Return the prompts, and whether they came in a list."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidRequest("give either `text` or `input_ids`", param="text" if body.input_ids else "input_ids")
    if isinstance(body.text, str):
        return [body.text], False
    if not (body.text or body.input_ids):
        name = "input_ids" if body.text is None else "text"
        raise InvalidRequest(f"`{name}` is empty", param=name)
    if body.text:
        return body.text, True
    token_ids, lists = _split_ids(body.input_ids or [], "input_ids")
    return ([token_ids], False) if token_ids else (lists, True)


def _request_names(rid: str | list[str] | None, request_id: str, num: int, *, is_batch: bool) -> Sequence[str]:
    if isinstance(rid, list):
        _check_count(rid, num, "rid")
        names = rid
    else:
        name = request_id if rid is None else rid
        names = [f"{name}_{index}" for index in range(num)] if is_batch else [name]
    if wrong := next((name for name in names if not REQUEST_NAME.fullmatch(name)), None):
        raise InvalidRequest(f"`rid` must be 1 to 128 visible ASCII characters, but it is {wrong[:40]!r}", param="rid")
    return names


def _asked_token_ids(given: list[int | list[int]] | None, num: int) -> Sequence[list[int] | None]:
    if not given:
        return [None] * num
    token_ids, lists = _split_ids(given, "token_ids_logprob")
    if token_ids:
        return [token_ids] * num
    _check_count(lists, num, "token_ids_logprob")
    return lists


def _split_ids(given: list[int | list[int]], name: str) -> tuple[list[int], list[list[int]]]:
    """Return token ids for all prompts, and lists of token ids with one for each prompt; one of both is empty.

    Raises `InvalidRequest` if neither is.
    """
    token_ids = [one for one in given if isinstance(one, int)]
    lists = [one for one in given if isinstance(one, list)]
    if token_ids and lists:
        raise InvalidRequest(
            f"`{name}` mixes token ids with lists of token ids; put the ids of each prompt into a list of their own",
            param=name,
        )
    return token_ids, lists


def _for_each(given: T | list[T] | None, num: int, name: str) -> Sequence[T | None]:
    """Return a value for each of `num` prompts."""
    if not isinstance(given, list):
        return [given] * num
    _check_count(given, num, name)
    return given


def _check_count(given: list[Any], num: int, name: str) -> None:
    if len(given) != num:
        raise InvalidRequest(f"`{name}` has {len(given)} entries, but there are {num} prompts", param=name)


def _or_default(value: int | None, default: int) -> int:
    return default if value is None else value
