"""Parameters of sampling, and conditions for stopping.

`SamplingParams` is written by the user. The client resolves it into `Sampling` (which a worker needs to choose a token)
and `Stopping` (which the scheduler needs to finish a request); strings stay in the client.
"""

from __future__ import annotations

import copy
import enum
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from eagleray.errors import InvalidRequest
from eagleray.messages.grammars import Grammar
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.messages.thinking import Thinking

MAX_INTEGER = 2**63 - 1
"""Largest integer of any field, limited by the wires between processes."""
MAX_SEED = MAX_INTEGER

# Each of these is work for every token of every sequence that has it, in the API server or in the worker.
MAX_STOP_STRINGS = 32
"""Number of stop strings of a request. OpenAI's API takes 4."""
MAX_STOP_CHARS = 256
"""Length of one stop string, since that much text is held back while it may become one."""
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARS = 64
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024

MAX_PATTERN_SIZE = 1024
MAX_PATTERN_COUNT = 2**20
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
"""Limit beyond which logits in float32 overflow."""

MAX_SHOWN_CHARS = 200
"""Number of characters of a wrong value that an error shows."""


class RequestOutputKind(enum.Enum):
    """Content of the outputs that a request yields while it runs, with the names and numbers of vLLM."""

    CUMULATIVE = 0
    """Each output is everything so far."""
    DELTA = 1
    """Each output is what is new since the one before."""
    FINAL_ONLY = 2
    """The only output is the whole one, at the end."""


class RepetitionDetectionParams(msgspec.Struct, frozen=True):
    """Condition under which the end of a completion counts as repetitive, with vLLM's names. Raises `InvalidRequest`
    for values that contradict each other."""

    max_pattern_size: Annotated[int, Meta(description="Length of the longest pattern, in tokens; 0: no detection.")] = 0
    min_pattern_size: Annotated[int, Meta(description="Length of the shortest pattern; 0 means 1.")] = 0
    min_count: Annotated[int, Meta(description="Number of copies of a pattern at which the completion ends.")] = 0

    def __post_init__(self) -> None:
        limits = {
            "max_pattern_size": (0, MAX_PATTERN_SIZE),
            "min_pattern_size": (0, self.max_pattern_size),
            "min_count": (2 if self.max_pattern_size else 0, MAX_PATTERN_COUNT),
        }
        for name, (least, most) in limits.items():
            value = getattr(self, name)
            is_valid = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            field = f"repetition_detection.{name}"
            _require(is_valid, field, value, f"an integer between {least} and {most}")


class SamplingParams(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of one request, with the names and defaults of vLLM.

    Construction raises `InvalidRequest` (a ValueError) for a value that makes no sense. Fields may be assigned: the
    values are checked again by `check` when a request is made of them, and later changes do not affect that request.
    """

    n: int = 1
    """Number of completions of the prompt."""
    temperature: float = 1.0
    """0 is greedy; below 1 sharpens, above 1 flattens."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to at least this; in (0, 1]."""
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Drop tokens less likely than this fraction of the likeliest; in [0, 1]."""
    seed: int | None = None
    """The draw at a position depends on the seed and the position alone. -1 means None."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated already; in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted once per occurrence of a token among the generated ones; in [-2, 2]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al., 2019); in
    [0.01, 100]."""
    logit_bias: dict[int, float] | None = None
    """Added to the logits of these token ids; each in [-100, 100]."""
    allowed_token_ids: list[int] | None = None
    """Token ids that may be generated; None allows all."""
    bad_words: list[str] | None = None
    """Texts that must not be generated; matched by their tokens."""
    stop: str | list[str] | None = None
    """Strings that finish the generation when the text contains one."""
    stop_token_ids: list[int] | None = None
    """Token ids that finish the generation."""
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    """Whether to continue after the model's end-of-sequence token."""
    min_tokens: int = 0
    """Number of tokens before which no end-of-sequence token, stop token or stop string counts."""
    max_tokens: int | None = 16
    """Limit for generated tokens; None fills the model's length."""
    logprobs: int | None = None
    """Number of likeliest tokens whose log-probabilities are reported at each position, beside the chosen one; 0
    reports the chosen token alone, -1 every token of the vocabulary. The option `logprobs_mode` says which numbers."""
    logprob_token_ids: list[int] | None = None
    """Also report the log-probabilities of these ids at every position."""
    prompt_logprobs: int | None = None
    """The same as `logprobs` for the prompt's own tokens, always before any sampling parameter."""
    return_routed_experts: bool | None = None
    """Whether to report the experts that computed each token. None: if the engine has it enabled and the interface
    reports them by default (`LLM` and `/inference/v1/generate`)."""
    routed_experts_prompt_start: int = 0
    """First position of the prompt to report."""
    detokenize: bool = True
    """Whether to return text; False returns token ids only."""
    skip_special_tokens: bool = True
    kept_special_token_ids: list[int] | None = None
    """Special tokens that stay in the text although `skip_special_tokens` is true: the markers that divide answers into
    reasoning, content and tool calls."""
    spaces_between_special_tokens: bool = True
    """Has no effect: the tokenizer's own decoder decides about spaces."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """Content of the outputs that `AsyncLLM` yields. `LLM` and the HTTP routes ignore it."""
    skip_reading_prefix_cache: bool | None = None
    """Whether to compute the whole prompt even if the prefix cache has a part of it. None: only the part that
    `prompt_logprobs` needs."""
    skip_clone: bool = False
    """Has no effect."""
    flat_logprobs: bool = False
    """Whether outputs have log-probabilities as `FlatLogprobs`, which spares Python's garbage collector."""

    trace_decode_token_ids: list[int] | None = None
    """Token ids to generate in place of what would be sampled, with the log-probabilities that the model gives them.
    The completion ends with the last of them; neither an end-of-sequence token nor `stop` ends it earlier. Only with
    `n` 1."""

    repetition_detection: RepetitionDetectionParams | None = None
    """Condition under which a completion ends because it repeats itself, with `finish_reason` `repetition`."""
    stream_interval: int | None = None
    """Number of tokens of a completion that a stream collects before it yields them, if that is more than the option
    `stream_interval`. The first token and the end are yielded at once."""

    prompt_logprob_token_ids: Sequence[Sequence[int]] | None = None
    """Token ids [num_rows, num_ids], also as an array, to score at positions of the prompt: row i as continuations of
    the tokens up to `prompt_logprob_start` + i. The prompt's last token has no row. -1 fills short rows. The scores are
    `RequestOutput.prompt_token_id_logprobs`."""
    prompt_logprob_start: int | None = None
    """First position that has a row; None: 0."""

    structured_outputs: StructuredOutputsParams | None = None
    """Constraint that the text of the completion follows."""

    thinking_token_budget: int | None = None
    """Number of tokens after which the model's thinking is ended, and its answer begins; None and -1: no limit."""

    # The following fields are accepted only with values that change nothing.
    extra_args: dict[str, Any] | None = None
    watermarking: bool | None = None

    def __post_init__(self) -> None:
        if self.seed == -1:
            self.seed = None
        if isinstance(self.structured_outputs, dict):
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        if isinstance(self.repetition_detection, dict):
            self.repetition_detection = _repetition_detection(self.repetition_detection)
        # As in vLLM, true asks for the likeliest token.
        if self.logprobs is True:
            self.logprobs = 1
        if self.prompt_logprobs is True:
            self.prompt_logprobs = 1
        self.check()

    def check(self) -> None:
        """Raise `InvalidRequest` for a value that makes no sense, or that asks for a feature that does not exist."""
        _check(self)
        _check_unsupported(self)

    @classmethod
    def from_optional(cls, **fields: Any) -> SamplingParams:
        """Return parameters where None stands for the default, and `logit_bias` may have ids as texts and biases
        beyond the limits. Raises `InvalidRequest`."""
        given = {name: value for name, value in fields.items() if value is not None or name == "max_tokens"}
        if (biases := given.get("logit_bias")) is not None:
            try:
                given["logit_bias"] = {int(token): min(100.0, max(-100.0, bias)) for token, bias in biases.items()}
            except (ValueError, TypeError):
                raise InvalidRequest(
                    f"`logit_bias` must have biases by token id, but it is {_show(biases)}", param="logit_bias"
                ) from None
        return cls(**given)

    def clone(self) -> SamplingParams:
        """Return a copy whose fields may be assigned without an effect on this object."""
        return copy.deepcopy(self)

    @property
    def thinking_limit(self) -> int | None:
        """Limit of the tokens of thinking; None: no limit."""
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


def _check(params: SamplingParams) -> None:
    at_least = {"n": 1, "top_k": -1, "min_tokens": 0, "max_tokens": 1, "logprobs": -1, "prompt_logprobs": -1}
    at_least |= {"stream_interval": 1, "prompt_logprob_start": 0, "routed_experts_prompt_start": 0}
    at_least |= {"thinking_token_budget": -1}
    for name, least in at_least.items():
        value = getattr(params, name)
        if value is not None:
            _require(isinstance(value, int) and not isinstance(value, bool), name, value, "an integer")
            _require(value >= least, name, value, f"at least {least}")
            _require(value <= MAX_INTEGER, name, value, f"at most {MAX_INTEGER}")
    ranges = {
        "temperature": (0.0, math.inf),
        "top_p": (0.0, 1.0),
        "min_p": (0.0, 1.0),
        "presence_penalty": (-2.0, 2.0),
        "frequency_penalty": (-2.0, 2.0),
        "repetition_penalty": (MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    }
    for name, (low, high) in ranges.items():
        value = getattr(params, name)
        _require(_is_finite(value), name, value, "a finite number")
        limits = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        _require(low <= value <= high, name, value, limits)
    _require(params.top_p > 0, "top_p", params.top_p, "greater than 0")
    if params.seed is not None:
        _require(isinstance(params.seed, int), "seed", params.seed, "an integer")
        _require(-MAX_SEED <= params.seed <= MAX_SEED, "seed", params.seed, "a 64-bit integer")
    if params.max_tokens is not None:
        _require(params.min_tokens <= params.max_tokens, "min_tokens", params.min_tokens, "at most max_tokens")
    constraint = params.structured_outputs
    is_constraint = constraint is None or isinstance(constraint, StructuredOutputsParams)
    _require(is_constraint, "structured_outputs", constraint, "a StructuredOutputsParams or a dictionary of its fields")
    _check_lists(params)
    kept = params.kept_special_token_ids or ()
    are_ids = all(isinstance(token_id, int) for token_id in kept)
    _require(are_ids, "kept_special_token_ids", kept, "a list of token ids")
    for token_id, bias in (params.logit_bias or {}).items():
        is_valid = _is_finite(bias) and -100 <= bias <= 100
        _require(is_valid, "logit_bias", {token_id: bias}, "between -100 and 100")
    for name in ("return_routed_experts", "skip_reading_prefix_cache"):
        asks = getattr(params, name)
        _require(asks is None or isinstance(asks, bool), name, asks, "true or false")
    detection = params.repetition_detection
    is_detection = detection is None or isinstance(detection, RepetitionDetectionParams)
    _require(is_detection, "repetition_detection", detection, "a RepetitionDetectionParams")
    kind = params.output_kind
    _require(isinstance(kind, RequestOutputKind), "output_kind", kind, "a RequestOutputKind")
    allowed = params.allowed_token_ids
    _require(allowed is None or len(allowed) > 0, "allowed_token_ids", allowed, "non-empty when given")
    for name, texts in (("stop", params.stop_strings), ("bad_words", params.bad_words or [])):
        _require(all(isinstance(text, str) and text for text in texts), name, texts, "non-empty strings")
    if params.stop_strings and not params.detokenize:
        raise InvalidRequest("stop strings need the text: leave `detokenize` on, or use `stop_token_ids`", param="stop")
    if params.n > 1 and params.trace_decode_token_ids:
        raise InvalidRequest("`trace_decode_token_ids` gives one completion: leave `n` at 1", param="n")
    if params.thinking_limit is not None and params.trace_decode_token_ids:
        raise InvalidRequest(
            "`trace_decode_token_ids` determines all tokens: leave `thinking_token_budget` out",
            param="thinking_token_budget",
        )
    if params.n > 1 and params.temperature == 0:
        raise InvalidRequest("n > 1 with temperature 0 would give n equal completions; set a temperature", param="n")


UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "extra_args": ((None, {}), "there are no plug-ins that would read them"),
    "watermarking": ((None, False), "no marks are put into texts"),
}
"""Fields of vLLM whose features do not exist: the values that are accepted, and what there is instead."""


def _repetition_detection(fields: dict[str, Any]) -> RepetitionDetectionParams:
    try:
        return RepetitionDetectionParams(**fields)
    except TypeError:
        names = ", ".join(RepetitionDetectionParams.__struct_fields__)
        raise InvalidRequest(
            f"`repetition_detection` has the fields {names}, but not {_show([*fields])}", param="repetition_detection"
        ) from None


def _check_unsupported(params: SamplingParams) -> None:
    """Raise `InvalidRequest` if a field asks for a feature that does not exist."""
    for name, (off_values, instead) in UNSUPPORTED.items():
        value = getattr(params, name)
        if not any(value is off or value == off for off in off_values):
            raise InvalidRequest(f"`{name}` is not supported: {instead}; leave it out", param=name)


def resolve_all_logprobs(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the parameters with -1 (all) in `logprobs` and `prompt_logprobs` replaced by the number of tokens."""
    changes = {name: vocab_size for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1}
    return msgspec.structs.replace(params, **changes) if changes else params


def _check_lists(params: SamplingParams) -> None:
    """Raise `InvalidRequest` for a list that is none, that has too many entries, or a text that is too long."""
    for name in ("stop", "bad_words", "stop_token_ids", "allowed_token_ids", "kept_special_token_ids"):
        value = getattr(params, name)
        _require(value is None or isinstance(value, Collection), name, value, "a list")
    biases = params.logit_bias
    _require(biases is None or isinstance(biases, Mapping), "logit_bias", biases, "a mapping from token ids to numbers")
    most = {
        "stop_strings": MAX_STOP_STRINGS,
        "bad_words": MAX_BAD_WORDS,
        "stop_token_ids": MAX_STOP_TOKEN_IDS,
        "kept_special_token_ids": MAX_STOP_TOKEN_IDS,
        "logit_bias": MAX_LOGIT_BIASES,
    }
    for name, limit in most.items():
        count = len(getattr(params, name) or ())
        if count > limit:
            field = "stop" if name == "stop_strings" else name
            raise InvalidRequest(f"`{field}` may have at most {limit} entries, but it has {count}", param=field)
    texts = (("stop", params.stop_strings, MAX_STOP_CHARS), ("bad_words", params.bad_words or [], MAX_BAD_WORD_CHARS))
    for field, strings, limit in texts:
        longest = max((len(text) for text in strings if isinstance(text, str)), default=0)
        if longest > limit:
            raise InvalidRequest(
                f"each entry of `{field}` may have at most {limit} characters, but one has {longest}", param=field
            )


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False


def _require(holds: bool, name: str, value: Any, expected: str) -> None:
    if not holds:
        raise InvalidRequest(f"`{name}` must be {expected}, but it is {_show(value)}", param=name)


def _show(value: Any) -> str:
    """Format `value` for an error: in full unless it is long, such as an integer of thousands of digits."""
    if isinstance(value, int) and not -MAX_INTEGER <= value <= MAX_INTEGER:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters that a worker needs to choose the next token of one request: numbers and token ids only."""

    seed: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Number of likeliest tokens to keep; 0 keeps all."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Token ids that may be generated; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences whose last token is forbidden where the ones before it were just generated."""
    min_tokens: int = 0
    suppressed_token_ids: tuple[int, ...] = ()
    """Token ids that would finish the request, forbidden until `min_tokens` tokens were generated."""
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprob_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token ids that are scored too, as many for each token of the prompt but the first; only with
    `prompt_logprobs`."""
    forced_token_ids: tuple[int, ...] = ()
    """Token ids that are generated in place of the drawn ones, while their log-probabilities are real."""
    grammar: Grammar | None = None
    """Grammar that the generated text follows, after the thinking."""
    thinking: Thinking | None = None
    """Thinking before the text; None if it has neither a limit nor a grammar after it."""

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probabilities of generated tokens are reported."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def is_masked(self) -> bool:
        """Whether the generated tokens determine which tokens may come next."""
        return self.grammar is not None or self.thinking is not None


class Stopping(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters that the scheduler needs to finish a request."""

    max_tokens: int
    min_tokens: int = 0
    eos_token_ids: tuple[int, ...] = ()
    """The model's end-of-sequence tokens; empty under `ignore_eos`."""
    stop_token_ids: tuple[int, ...] = ()
