"""Turns a user's prompt and parameters into a request: token ids, default values, names, seeds, limits.

Parameters that the engine cannot follow are refused here, with a sentence that names the parameter.
"""

from __future__ import annotations

import itertools
import operator
import random
import secrets
from collections.abc import Callable, Container, Iterable, Mapping, Sized
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import msgspec

from eagleray.client.field_checks import (
    check_common,
    check_generates,
    check_ids,
    check_length,
    check_range,
    check_seconds,
    check_text,
    routed_experts_from,
)
from eagleray.client.prompt_scores import PromptScores
from eagleray.client.request import ClientRequest
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.client.thinking import ThinkingBuilder
from eagleray.client.tracing import RequestOrigin, make_origin
from eagleray.errors import InvalidRequest
from eagleray.identity import ClientId
from eagleray.messages.adapters import Adapter
from eagleray.messages.grammars import Grammar
from eagleray.messages.membership import EngineInfo
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import MAX_SEED, Sampling, SamplingParams, Stopping, resolve_all_logprobs
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.messages.thinking import Thinking

if TYPE_CHECKING:
    from eagleray.client.otel import RequestTracer

MAX_COMPLETIONS = 1024
"""Largest `n`: each completion is a request of its own, with a copy of the prompt."""
MAX_LOGPROB_TOKEN_IDS = 128
MAX_PROMPT_END_TOKENS = 16_384
"""Number of tokens at the end of a prompt without a text that are decoded to find out whether the model thinks."""
SEED_BITS = 63
TRACE = "trace_decode_token_ids"


class Prompt(NamedTuple):
    """A text, or token ids. With both, the ids count and the text is only shown."""

    text: str | None = None
    token_ids: list[int] | None = None


class RequestOptions(TypedDict, total=False):
    """Options of a request that generates or pools."""

    request_id: str | None
    """Id that is unique among the requests in flight; by default one is made."""
    priority: int
    cache_salt: str
    timeout: float | None
    """Seconds after which the request fails with `DeadlineExceeded`; None: the server's own (`request_timeout`)."""
    session: str | None
    """Requests of one session go to the same engine while it is up."""
    rank: int | None
    """The only engine that the request may go to."""
    adapter: Adapter | None
    """See `Client.find_adapter`."""
    origin: RequestOrigin | None
    """None: this program makes the request now."""
    trace_headers: Mapping[str, str] | None
    """Headers that name the parent of its span, if it has no `origin`."""


class _CommonFields(NamedTuple):
    """Fields of all messages of a request."""

    request_id: str
    priority: int
    cache_salt: str
    adapter: Adapter | None


POOLED = SamplingParams(max_tokens=1, detokenize=False)
"""Parameters of requests to pooling models, which have neither tokens nor text."""


class RequestBuilder:
    """Builds the requests of one client. Without a `tokenizer`, requests have token ids only; without `thinking`, all
    that the model writes is the answer.

    `seed` determines the seeds of requests that have none; None makes them random. `request_timeout` is the time limit,
    in seconds, of requests that set none; None means no limit. `stream_interval` is the least number of tokens of a
    completion that a stream yields together. `tracer` None: requests have no spans.
    """

    def __init__(
        self,
        client: ClientId,
        *,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        max_logprobs: int,
        thinking: ThinkingBuilder | None = None,
        make_grammar: Callable[[StructuredOutputsParams], Grammar] = StructuredOutputsParams.to_grammar,
        seed: int | None = None,
        max_request_restarts: int = 0,
        request_timeout: float | None = None,
        stream_interval: int = 1,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.tracer = tracer
        self._client = client
        self._eos_token_ids = eos_token_ids
        self._max_logprobs = max_logprobs
        self._thinking = thinking
        self._make_grammar = make_grammar
        self._draw_seed: Callable[[], int] = partial(
            secrets.randbits if seed is None else random.Random(seed).getrandbits, SEED_BITS
        )
        self._max_request_restarts = max_request_restarts
        self._request_timeout = request_timeout
        self._stream_interval = stream_interval
        self._serials = itertools.count()

    def build(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        engine: EngineInfo,
        *,
        ids_in_use: Container[str],
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
        session: str | None = None,
        rank: int | None = None,
        adapter: Adapter | None = None,
        origin: RequestOrigin | None = None,
        trace_headers: Mapping[str, str] | None = None,
    ) -> ClientRequest:
        """Build a request for engines that serve `engine`; see `RequestOptions`. `params` None: for the vector of a
        pooling model. Raises `InvalidRequest`."""
        if params is not None:
            check_generates(engine)
            params.check()  # fields may have been assigned since the construction
            params = resolve_all_logprobs(params, engine.vocab_size)
            if (params.stream_interval or 1) < self._stream_interval:
                params = msgspec.structs.replace(params, stream_interval=self._stream_interval)
        serial = next(self._serials)
        name = f"{self._client.label}-{serial}" if request_id is None else request_id
        check_text(name, "request_id")
        if name in ids_in_use:
            raise InvalidRequest(
                f"request id {name!r} is in use: the ids of running requests must be unique", param="request_id"
            )
        if session is not None:
            check_text(session, "session")
        seconds = self._request_timeout if timeout is None else timeout
        if seconds is not None:
            check_seconds(seconds)
        token_ids = self.tokenize(prompt, engine)
        # The serial makes the id unique, so late chunks of an aborted request match no other request.
        common = _CommonFields(f"{name}#{serial}", priority, cache_salt, adapter)
        scores = None
        if params is None:
            messages = [self._make_pooled_message(token_ids, common)]
        else:
            if params.trace_decode_token_ids:
                params = _forced(params, engine, room=engine.max_model_len - len(token_ids))
            seed = self._draw_seed() if params.seed is None else params.seed
            scores = self._scores(params, engine, len(token_ids))
            messages = self.make_messages(
                token_ids, params, engine, seed=seed, scores=scores, text=prompt.text, **common._asdict()
            )
        return ClientRequest(
            name,
            messages,
            params or POOLED,
            prompt=prompt.text,
            scores=scores,
            tokenizer=self.tokenizer,
            routing=engine.routing,
            max_restarts=self._max_request_restarts,
            timeout=seconds,
            session=session,
            rank=rank,
            trace=None
            if self.tracer is None
            else self.tracer.begin(origin or make_origin(name, trace_headers), params, adapter),
        )

    def tokenize(self, prompt: Prompt, engine: EngineInfo) -> list[int]:
        """Return the prompt's token ids. Raises `InvalidRequest` for a prompt that the model cannot continue."""
        if prompt.token_ids is not None:
            if isinstance(prompt.token_ids, Sized):  # before millions of ids are checked
                check_length(len(prompt.token_ids), engine)
            token_ids = check_ids(prompt.token_ids, engine.vocab_size, "prompt")
        elif prompt.text is not None:
            token_ids = self._need_tokenizer("a text prompt", "prompt").encode(prompt.text, add_special_tokens=True)
            check_range(token_ids, engine.vocab_size, "prompt")
        else:
            raise InvalidRequest("a prompt needs a text or token ids", param="prompt")
        if not token_ids:
            purpose = "" if engine.pooling is not None else " to continue from"
            raise InvalidRequest(f"the prompt is empty, but it needs at least one token{purpose}", param="prompt")
        check_length(len(token_ids), engine)
        return token_ids

    def make_messages(
        self,
        token_ids: list[int],
        params: SamplingParams,
        engine: EngineInfo,
        *,
        request_id: str,
        seed: int,
        priority: int = 0,
        cache_salt: str = "",
        adapter: Adapter | None = None,
        scores: PromptScores | None = None,
        text: str | None = None,
    ) -> list[Generate]:
        """Return one message for each of the `n` completions. `seed`: the request's own, or one drawn for it. `text`:
        that of the prompt, if it is known.

        Raises `InvalidRequest` for parameters that this model or this server cannot follow.
        """
        self._check(params, engine.vocab_size)
        first_routed = routed_experts_from(params, engine, len(token_ids))
        check_common(priority, cache_salt)
        sampling = self._sampling(params, engine, seed)
        constraint = params.structured_outputs
        if params.thinking_limit is not None or (constraint is not None and constraint.after_reasoning):
            sampling = msgspec.structs.replace(
                sampling, thinking=self._make_thinking(text, token_ids, params, engine, sampling.grammar)
            )
        if scores is not None:
            sampling = msgspec.structs.replace(
                sampling,
                prompt_logprobs=sampling.prompt_logprobs or 0,
                prompt_logprob_token_ids=scores.of_all_positions(),
            )
        stopping = self._stopping(params, engine, room=engine.max_model_len - len(token_ids))
        return [
            Generate(
                request_id=request_id if params.n == 1 else f"{request_id}/{index}",
                client=self._client,
                prompt_token_ids=token_ids,
                sampling=sampling if params.n == 1 else _sampling_of_child(sampling, index),
                stopping=stopping,
                priority=int(priority),
                cache_salt=str(cache_salt),
                adapter="" if adapter is None else adapter.name,
                adapter_number=0 if adapter is None else adapter.number,
                routed_experts_from=first_routed,
                skip_reading_prefix_cache=bool(params.skip_reading_prefix_cache),
            )
            for index in range(params.n)
        ]

    def _make_pooled_message(self, token_ids: list[int], common: _CommonFields) -> Generate:
        check_common(common.priority, common.cache_salt)
        return Generate(
            request_id=common.request_id,
            client=self._client,
            prompt_token_ids=token_ids,
            sampling=Sampling(seed=0),
            stopping=Stopping(max_tokens=1),
            priority=int(common.priority),
            cache_salt=str(common.cache_salt),
            adapter="" if common.adapter is None else common.adapter.name,
            adapter_number=0 if common.adapter is None else common.adapter.number,
            pools=True,
        )

    def _check(self, params: SamplingParams, vocab_size: int) -> None:
        most = self._most_logprobs(vocab_size)
        if params.n > MAX_COMPLETIONS:
            raise InvalidRequest(f"`n` must be at most {MAX_COMPLETIONS}, but it is {params.n}", param="n")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(params, name)
            if value is not None and value > most:
                raise InvalidRequest(
                    f"`{name}` must be at most {most} (the option `max_logprobs`), but it is {value}",
                    param=name,
                )
        if len(params.logprob_token_ids or ()) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                f"`logprob_token_ids` may hold at most {MAX_LOGPROB_TOKEN_IDS} ids, but it has "
                f"{len(params.logprob_token_ids or ())}",
                param="logprob_token_ids",
            )
        if params.stop_strings:
            self._need_tokenizer("`stop`", "stop")
        if params.structured_outputs is not None:
            self._need_tokenizer("`structured_outputs`", "structured_outputs")
            if params.trace_decode_token_ids:
                raise InvalidRequest(
                    "`trace_decode_token_ids` gives the tokens of the completion, which `structured_outputs` cannot "
                    "constrain then: leave one of them out",
                    param="structured_outputs",
                )

    def _scores(self, params: SamplingParams, engine: EngineInfo, num_prompt_tokens: int) -> PromptScores | None:
        if params.prompt_logprob_token_ids is None:
            return None
        return PromptScores.of(
            params,
            num_prompt_tokens=num_prompt_tokens,
            vocab_size=engine.vocab_size,
            max_ids=self._most_logprobs(engine.vocab_size),
        )

    def _most_logprobs(self, vocab_size: int) -> int:
        return vocab_size if self._max_logprobs == -1 else self._max_logprobs

    def _sampling(self, params: SamplingParams, engine: EngineInfo, seed: int) -> Sampling:
        bias = params.logit_bias or {}
        asked = check_ids(params.logprob_token_ids, engine.vocab_size, "logprob_token_ids")
        end_tokens = _unique(
            [*self._eos(params, engine), *check_ids(params.stop_token_ids, engine.vocab_size, "stop_token_ids")]
        )
        # Plain numbers of bounded size: other values cannot be encoded, or not be decoded by the engine.
        return Sampling(
            seed=int(seed),
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=min(max(0, params.top_k), engine.vocab_size),
            min_p=float(params.min_p),
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=dict(
                zip(check_ids(bias, engine.vocab_size, "logit_bias"), map(float, bias.values()), strict=True)
            ),
            allowed_token_ids=_unique(check_ids(params.allowed_token_ids, engine.vocab_size, "allowed_token_ids")),
            bad_words=self._bad_words(params.bad_words or []),
            min_tokens=min(params.min_tokens, engine.max_model_len),
            suppressed_token_ids=end_tokens if params.min_tokens else (),
            logprobs=0 if params.logprobs is None and asked else params.logprobs,
            logprob_token_ids=_unique(asked),
            prompt_logprobs=params.prompt_logprobs,
            forced_token_ids=tuple(params.trace_decode_token_ids or ()),
            grammar=None if params.structured_outputs is None else self._make_grammar(params.structured_outputs),
        )

    def _make_thinking(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        engine: EngineInfo,
        grammar: Grammar | None,
    ) -> Thinking | None:
        if self._thinking is None:
            if params.thinking_limit is None:
                return None
            self._need_tokenizer("`thinking_token_budget`", "thinking_token_budget")
            raise InvalidRequest(
                "`thinking_token_budget` is not supported for this model, because its chat template shows no reasoning "
                "of a known format: leave it out, or start with the option `reasoning_parser`",
                param="thinking_token_budget",
            )
        if text is None:
            last = token_ids[-MAX_PROMPT_END_TOKENS:]
            text = self._need_tokenizer("thinking", "prompt").decode(last, skip_special_tokens=False)
        return self._thinking.build(text, budget=params.thinking_limit, grammar=grammar, vocab_size=engine.vocab_size)

    def _stopping(self, params: SamplingParams, engine: EngineInfo, *, room: int) -> Stopping:
        return Stopping(
            max_tokens=room if params.max_tokens is None else int(min(params.max_tokens, room)),
            min_tokens=min(params.min_tokens, engine.max_model_len),
            eos_token_ids=self._eos(params, engine),
            stop_token_ids=_unique(params.stop_token_ids or ()),
        )

    def _eos(self, params: SamplingParams, engine: EngineInfo) -> tuple[int, ...]:
        if params.ignore_eos:
            return ()
        return tuple(token_id for token_id in self._eos_token_ids if token_id < engine.vocab_size)

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """Return each word as it is tokenized at the beginning of a text, and after a space within one."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            encode = self._need_tokenizer("`bad_words`", "bad_words").encode
            check_text(word, "bad_words")
            for text in (word.lstrip() or word, " " + word.lstrip()):
                sequences[tuple(encode(text, add_special_tokens=False))] = None
        sequences.pop((), None)
        return tuple(sequences)

    def _need_tokenizer(self, what: str, param: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                f"{what} needs the tokenizer, and there is none because of `skip_tokenizer_init`: use token ids",
                param=param,
            )
        return self.tokenizer


def child_seed(seed: int, index: int) -> int:
    """Return the seed of completion `index` of several: unlike its neighbours', and the same in every run."""
    digest = blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & MAX_SEED


def _sampling_of_child(sampling: Sampling, index: int) -> Sampling:
    """Return the sampling of completion `index` of several. The first reports the prompt, which all have in common."""
    return msgspec.structs.replace(
        sampling,
        seed=child_seed(sampling.seed, index),
        prompt_logprobs=sampling.prompt_logprobs if index == 0 else None,
        prompt_logprob_token_ids=sampling.prompt_logprob_token_ids if index == 0 else (),
    )


def _forced(params: SamplingParams, engine: EngineInfo, *, room: int) -> SamplingParams:
    """Return the parameters by which exactly the tokens of `trace_decode_token_ids` are generated, up to `max_tokens`
    and to the `room` in the model's length. Raises `InvalidRequest` for values that are no ids of the model."""
    given = params.trace_decode_token_ids
    # cut before millions of ids are checked
    token_ids = check_ids(given[:room] if isinstance(given, list) else given, engine.vocab_size, TRACE)[:room]
    return msgspec.structs.replace(
        params,
        trace_decode_token_ids=token_ids,
        max_tokens=len(token_ids) if params.max_tokens is None else min(len(token_ids), params.max_tokens),
        min_tokens=0,
        ignore_eos=True,
        stop=None,
        stop_token_ids=None,
    )


def _unique(token_ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(map(operator.index, token_ids)))
