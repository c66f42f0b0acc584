"""The fields and headers that several routes share. null means "not given" for all fields, as in OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Protocol, cast

import msgspec
from msgspec import Meta
from starlette.datastructures import Headers

from eagleray.client.field_checks import MAX_TIMEOUT_SECONDS
from eagleray.client.preprocess import MAX_COMPLETIONS, MAX_LOGPROB_TOKEN_IDS
from eagleray.client.routing.router import RANK_HEADER, format_ranks
from eagleray.client.text.tokenizer import TruncationSide
from eagleray.errors import InvalidRequest
from eagleray.messages.sampling import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_INTEGER,
    MAX_LOGIT_BIASES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    RepetitionDetectionParams,
)

ShortText = Annotated[str, Meta(max_length=256)]
"""Text that is repeated in events and for each prompt of a request, so that a long one would take much memory."""

Timeout = Annotated[
    float,
    Meta(
        gt=0,
        extra_json_schema={"maximum": MAX_TIMEOUT_SECONDS},
        description="Seconds after which the request is given up with an error. Default: as the server is set up.",
    ),
]
ModelName = Annotated[str | None, Meta(description="A name of /v1/models; may be left out.")]
Priority = Annotated[int | None, Meta(description="Lower runs first. Only where the server schedules by priority.")]
CacheSalt = Annotated[
    str | None, Meta(description="Cached prompt beginnings are shared only between requests of the same salt.")
]
RequestId = Annotated[ShortText | None, Meta(description="Names the request. Default: the header X-Request-Id.")]
SessionId = Annotated[ShortText | None, Meta(description="Names a session. Default: the header X-Session-ID.")]

Temperature = Annotated[float | None, Meta(description="0 is greedy.")]
TopK = Annotated[int | None, Meta(description="0 or -1: all tokens.")]
LogitBias = Annotated[
    dict[int, float] | None,
    Meta(description="By token id.", extra_json_schema={"maxProperties": MAX_LOGIT_BIASES}),
]
StopTokenIds = Annotated[list[int] | None, Meta(extra_json_schema={"maxItems": MAX_STOP_TOKEN_IDS})]

Prompts = str | list[str | int | list[int]]
PromptField = Annotated[
    Prompts,
    Meta(description="A text, a list of texts, the token ids of one prompt, or a list of those."),
]

TruncationLimit = Annotated[
    Annotated[int, Meta(ge=-1, le=MAX_INTEGER)] | None,
    Meta(description="Keep this many tokens of a longer prompt; -1: as many as leave room for one token."),
]
KeptSide = Annotated[
    TruncationSide | None,
    Meta(
        description="Tokens to keep: right, the first ones; left, the last ones. Default: the last ones, and the "
        "special tokens around a text."
    ),
]

SESSION_HEADER = "X-Session-ID"
RANK_NUMBER = re.compile(r"[0-9]{1,9}")
MAX_SESSION_CHARS = 256
SESSION_NAME = re.compile(r"[\x21-\x7e]{1,256}")


class OptionFields(Protocol):
    """The fields of a body that become `RequestOptions`."""

    priority: int | None
    cache_salt: str | None
    timeout: float | None


class TruncationFields(Protocol):
    """The fields of a request that limit its prompts."""

    truncate_prompt_tokens: int | None
    truncation_side: TruncationSide | None


def split_prompts(given: Prompts, name: str) -> list[str | list[int]]:
    """Return the prompts of the field `name`, each a text or token ids. Raises `InvalidRequest`."""
    parts = [given] if isinstance(given, str) else given
    if not parts:
        raise InvalidRequest(f"`{name}` is empty; give a text, or token ids", param=name)
    kinds = set(map(type, parts))  # quick even for a million of them
    if int not in kinds:
        return cast("list[str | list[int]]", parts)
    if kinds == {int}:
        return [cast("list[int]", parts)]
    raise InvalidRequest(
        f"`{name}` mixes token ids with whole prompts; put the ids of each prompt into a list of their own", param=name
    )


def check_request_id(request_id: str | None, *, param: str = "request_id") -> str | None:
    """Return the id that a body gives to its request. Raises `InvalidRequest` for one that logs could not show."""
    if request_id is not None and not request_id.isprintable():
        raise InvalidRequest(f"`{param}` must be made of printable characters", param=param)
    return request_id


def routing_headers() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the headers that choose the engine."""
    return {
        RANK_HEADER: {
            "type": "integer",
            "minimum": 0,
            "description": "Rank of the engine that the request must go to, one of `ranks` in /server_info.",
        },
        SESSION_HEADER: {
            "type": "string",
            "pattern": f"^{SESSION_NAME.pattern}$",
            "description": "Name of a session. Its requests go to the same engine.",
        },
    }


def requested_rank(headers: Headers, ranks: Sequence[int]) -> int | None:
    """Return the rank, one of `ranks`, that the request must go to; None: any.

    Raises `InvalidRequest` for another rank, because a user who names an engine must not get a different one.
    """
    given = headers.get(RANK_HEADER)
    if given is None:
        return None
    if not RANK_NUMBER.fullmatch(given) or int(given) not in ranks:
        several = f"engines of the ranks {format_ranks(ranks)}"
        here = several if len(ranks) > 1 else f"one engine, of rank {format_ranks(ranks)}"
        raise InvalidRequest(
            f"header {RANK_HEADER}: there is no rank {given[:20]!r} here; this server has {here}", param=RANK_HEADER
        )
    return int(given)


def session_name(field: str | None, headers: Headers) -> str | None:
    """Return the name of the request's session, if it has one: its `field`, or else its header.

    Raises `InvalidRequest`.
    """
    given = headers.get(SESSION_HEADER)
    if given is not None and not SESSION_NAME.fullmatch(given):
        raise InvalidRequest(f"header {SESSION_HEADER} must be 1 to 256 visible ASCII characters", param=SESSION_HEADER)
    if field and len(field) > MAX_SESSION_CHARS:
        raise InvalidRequest(f"`session_id` may have at most {MAX_SESSION_CHARS} characters", param="session_id")
    return field or given


class SamplingFields(msgspec.Struct, kw_only=True):
    """The fields of `SamplingParams`, which checks their values; `logprobs` differs by route."""

    n: Annotated[
        int | None,
        Meta(description="Number of completions of each prompt.", extra_json_schema={"maximum": MAX_COMPLETIONS}),
    ] = None
    temperature: Temperature = None
    top_p: float | None = None
    top_k: TopK = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: list[int] | None = None
    bad_words: Annotated[
        list[str] | None,
        Meta(
            description=f"Texts that must not be generated, of at most {MAX_BAD_WORD_CHARS} characters each.",
            extra_json_schema={"maxItems": MAX_BAD_WORDS},
        ),
    ] = None
    stop: Annotated[
        str | list[str] | None,
        Meta(
            description=f"Texts at which the completion ends, of at most {MAX_STOP_CHARS} characters each.",
            extra_json_schema={"maxItems": MAX_STOP_STRINGS},
        ),
    ] = None
    stop_token_ids: StopTokenIds = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Meta(
            description="Report the log-probabilities of these ids at every position.",
            extra_json_schema={"maxItems": MAX_LOGPROB_TOKEN_IDS},
        ),
    ] = None
    prompt_logprobs: int | None = None
    return_routed_experts: Annotated[
        bool | None,
        Meta(
            description="Report which experts computed each token, where the server has it on. Default: as it has, on "
            "/inference/v1/generate; false elsewhere."
        ),
    ] = None
    routed_experts_prompt_start: Annotated[int | None, Meta(description="First position of the prompt to report.")] = (
        None
    )
    detokenize: Annotated[bool | None, Meta(description="false: no text, token ids only.")] = None
    skip_special_tokens: bool | None = None
    stream_interval: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="With `stream`, tokens of a completion that an event has at least, if that is more than the "
            "server's own number. The first event and the last have what there is."
        ),
    ] = None
    repetition_detection: Annotated[
        RepetitionDetectionParams | None,
        Meta(description="End a completion that repeats itself, with `finish_reason` repetition."),
    ] = None
    thinking_token_budget: Annotated[
        int | None, Meta(description="Tokens after which the model's thinking is ended; -1: no limit.")
    ] = None


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: Annotated[bool | None, Meta(description="A last event with the usage of the whole request.")] = None
    continuous_usage_stats: Annotated[
        bool | None, Meta(description="The usage so far in every event. Only with `include_usage`.")
    ] = None


SAMPLING_NAMES = tuple(field.name for field in msgspec.structs.fields(SamplingFields))
