"""Treatment of the fields that programs send to routes that generate, without an effect here.

A field has an effect if the struct of the body has it (`openai/requests.py`, `generate.py`); every other field that is
known by name has a row in one of the tables of this module, and a field without a row is reported as ignored. A new
feature moves its fields from here into the struct. The document /openapi.json takes its descriptions of such fields
from here too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple


class Feature(NamedTuple):
    """A feature that does not exist here, for the sentence of a refusal."""

    name: str
    advice: str = "leave it out"


class Fate(NamedTuple):
    """Treatment of one field. null is accepted silently for all of them."""

    kind: Literal["accept", "ignore", "refuse"]
    """`accept`: any value, silently. `ignore`: reported in a header and once in the log, unless the value is in `off`.
    `refuse`: with a sentence about `feature`, unless the value is in `off`."""
    off: tuple[Any, ...] = ()
    """Values that mean the feature is off or has its usual value. Other spellings of them are converted as for fields
    with an effect."""
    feature: Feature = Feature("")
    equal_to: str = ""
    """Name of a field whose value, 1 by default, is in `off` too."""


ACCEPTED = Fate("accept")


def ignored(*off: Any) -> Fate:
    return Fate("ignore", off)


def refused(feature: Feature, *off: Any, equal_to: str = "") -> Fate:
    return Fate("refuse", off, feature, equal_to)


BEAM_SEARCH = Feature("beam search", "leave it out; `n` with a temperature gives several completions")
BEST_OF = Feature("a choice of the best of several completions", "give it the value of `n`, or leave it out")
SEVERAL_ANSWERS = Feature("several answers", "send several requests, or use /v1/chat/completions")
SUFFIX = Feature("insertion before a text", "leave it out")
FUNCTIONS = Feature("this older form of tools", "use `tools` and `tool_choice`")
AUDIO = Feature("audio", "leave it out; answers are texts")
MEDIA = Feature("images, audio and video", "leave it out; messages are texts")
WEB_SEARCH = Feature("web search", "leave it out")
PREDICTION = Feature("predicted outputs", "leave it out")
VERBOSITY = Feature("a verbosity of answers", "leave it out, and ask for short or long answers in the prompt")
REASONING = Feature("separate reasoning", "leave it out; the answer's text has the reasoning too")
JOINED_REASONING = Feature(
    "reasoning as a part of the text", "leave it out, or start the server with `--reasoning-parser none`"
)
EMBEDS = Feature("prompts of embeddings", "leave it out and send a text or token ids")
TRANSFER = Feature("transfer of the cache between servers", "leave it out")
PLUGINS = Feature("arguments of plug-ins", "leave it out")
PROCESSORS = Feature("logits processors of requests", "leave it out; `logit_bias` and `bad_words` are there")
REPETITION = Feature("detection of repetitions", "leave it out; `repetition_penalty` makes them less likely")
WATERMARK = Feature("watermarks", "leave it out")
ADAPTER = Feature("adapters by this name", "give the adapter's name as `model`")
EXTRA_BODY = Feature(
    "fields within this one",
    "write them beside the other fields of the body, as OpenAI's Python client does with its argument of this name",
)
CONTEXT_SIZE = Feature("a context size of requests", "leave it out; the option `--max-model-len` sets it")
GIVEN_TOKENS = Feature(
    "tokens given in advance on this route", "send them in `sampling_params` of /inference/v1/generate"
)
STOP_REGEX = Feature("stop conditions by patterns", "leave it out and use `stop`")


def _renamed(name: str) -> Feature:
    return Feature(f"this name of `{name}`", f"call it `{name}`")


def _other_sampling(kind: str) -> Feature:
    return Feature(kind, "leave it out and use `temperature`, `top_p`, `top_k` or `min_p`")


def _other_constraints(advice: str) -> Mapping[str, Fate]:
    """Return the fates of the fields by which other engines constrain answers."""
    feature = Feature("structured outputs by this name", advice)
    return dict.fromkeys(("regex", "ebnf", "json_schema", "grammar", "structural_tag"), refused(feature, ""))


def unconstrained(advice: str) -> Mapping[str, Fate]:
    """Return the fates of constraints on a route without `ConstraintFields`. `advice` names the field to use."""
    feature = Feature("structured outputs by this name", advice)
    return {
        **_other_constraints(advice),
        "response_format": refused(feature, {"type": "text"}),
        **dict.fromkeys(
            ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), refused(feature)
        ),
        "guided_whitespace_pattern": ACCEPTED,
    }


# Fields of other engines that change the tokens: whoever sends them would get other answers than expected.
OTHER_ENGINES: Mapping[str, Fate] = {
    "guided_decoding_backend": ACCEPTED,
    **_other_constraints("use `response_format` or `structured_outputs`"),
    "stop_regex": refused(STOP_REGEX, "", []),
    "lora_path": refused(ADAPTER),
    "custom_logit_processor": refused(PROCESSORS),
    "mirostat": refused(_other_sampling("Mirostat sampling"), 0),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta"), ACCEPTED),
    "typical_p": refused(_other_sampling("typical sampling"), 1.0, 0.0),
    "tfs_z": refused(_other_sampling("tail-free sampling"), 1.0),
    "top_a": refused(_other_sampling("top-a sampling"), 0.0),
    "dry_multiplier": refused(REPETITION, 0.0),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ACCEPTED),
    "xtc_probability": refused(_other_sampling("XTC sampling"), 0.0),
    "xtc_threshold": ACCEPTED,
    "dynatemp_range": refused(_other_sampling("a dynamic temperature"), 0.0),
    "dynatemp_exponent": ACCEPTED,
    "repeat_penalty": refused(_renamed("repetition_penalty"), 1.0),
    "repeat_last_n": ACCEPTED,
    **dict.fromkeys(("n_predict", "num_predict"), refused(_renamed("max_tokens"), -1)),
    "max_new_tokens": refused(_renamed("max_tokens")),
    "num_ctx": refused(CONTEXT_SIZE),
}

COMMON: Mapping[str, Fate] = {
    **OTHER_ENGINES,
    "extra_body": refused(EXTRA_BODY, {}),
    "best_of": refused(BEST_OF, 1, equal_to="n"),
    "use_beam_search": refused(BEAM_SEARCH, False),
    "length_penalty": refused(BEAM_SEARCH, 1.0),
    "early_stopping": refused(BEAM_SEARCH, False),
    "spaces_between_special_tokens": ACCEPTED,
    "trace_decode_token_ids": refused(GIVEN_TOKENS, []),
    "watermarking": refused(WATERMARK, False),
    "vllm_xargs": refused(PLUGINS, {}),
    "kv_transfer_params": refused(TRANSFER, {}),
    "ec_transfer_params": refused(TRANSFER, {}),
    "logits_processors": refused(PROCESSORS, []),
    "features": refused(MEDIA),
    "mm_processor_kwargs": refused(MEDIA, {}),
    "mm_payload": ACCEPTED,
    "return_mm_kwargs": refused(MEDIA, False),
    "prompt_embeds": refused(EMBEDS),
    "service_tier": ignored("auto", "default"),
    "store": ignored(False),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention", "safety_identifier"), ACCEPTED),
    "stream_options.include_obfuscation": ACCEPTED,
}

NO_REASONING: Mapping[str, Fate] = {
    "include_reasoning": refused(REASONING, True),
    "separate_reasoning": refused(REASONING, False),
}
"""Fields of routes whose answers are undivided."""

COMPLETION_FATES: Mapping[str, Fate] = {
    **COMMON,
    **NO_REASONING,
    "suffix": refused(SUFFIX, ""),
    "max_completion_tokens": refused(_renamed("max_tokens")),
    "messages": refused(Feature("messages on this route", "send them to /v1/chat/completions"), []),
}
"""Table of /v1/completions."""

TOKENIZE_FATES: Mapping[str, Fate] = {
    "media_io_kwargs": refused(MEDIA, {}),
    "mm_processor_kwargs": refused(MEDIA, {}),
}
"""Table of /tokenize."""

CHAT_FATES: Mapping[str, Fate] = {
    **COMMON,
    "separate_reasoning": refused(JOINED_REASONING, True),
    "functions": refused(FUNCTIONS, []),
    "function_call": refused(FUNCTIONS, "none", "auto"),
    "modalities": refused(AUDIO, ["text"], []),
    "audio": refused(AUDIO),
    "prediction": refused(PREDICTION),
    "verbosity": refused(VERBOSITY, "medium"),
    "web_search_options": refused(WEB_SEARCH),
    "media_io_kwargs": refused(MEDIA, {}),
    "suffix": refused(SUFFIX, ""),
}
"""Table of /v1/chat/completions."""


CONSTRAINED_BY_VLLM: Mapping[str, Fate] = {
    name: fate for name, fate in unconstrained("use `structured_outputs`").items() if name != "structured_outputs"
}
TEXT_PROMPTS = Feature("texts on this route", "send `token_ids`, or a text to /v1/completions")

GENERATE_FATES: Mapping[str, Fate] = {
    **dict.fromkeys(("prompt", "messages"), refused(TEXT_PROMPTS)),
    "features": refused(MEDIA, {}),
    "content_parts": refused(MEDIA, []),
    **dict.fromkeys(("token_offsets", "assistant_tokens_mask", "reasoning_ended", "reasoning_parser_kwargs"), ACCEPTED),
    "kv_transfer_params": refused(TRANSFER, {}),
    "ec_transfer_params": refused(TRANSFER, {}),
    **{
        f"sampling_params.{name}": ACCEPTED
        for name in (
            "spaces_between_special_tokens",
            "output_kind",
            "output_text_buffer_length",
            "skip_clone",
            "flat_logprobs",
        )
    },
    **{f"sampling_params.{name}": fate for name, fate in OTHER_ENGINES.items()},
    "sampling_params.best_of": refused(BEST_OF, 1, equal_to="n"),
    "sampling_params.use_beam_search": refused(BEAM_SEARCH, False),
    "sampling_params.length_penalty": refused(BEAM_SEARCH, 1.0),
    **{f"sampling_params.{name}": fate for name, fate in CONSTRAINED_BY_VLLM.items()},
    # written by vLLM's own class
    **dict.fromkeys(
        (f"sampling_params.structured_outputs.{name}" for name in ("_backend", "_backend_was_auto")), ACCEPTED
    ),
    "sampling_params.extra_args": refused(PLUGINS, {}),
    "sampling_params.watermarking": refused(WATERMARK, False),
}
"""Table of /inference/v1/generate, with the paths of the fields."""
