"""The bodies of the routes of pooling models, with vLLM's names, which include those of OpenAI, Jina and Cohere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from eagleray.client.text.tokenizer import TruncationSide
from eagleray.errors import InvalidRequest
from eagleray.server.chat_messages import Messages
from eagleray.server.field_fates import ACCEPTED, MEDIA, Fate, Feature, refused
from eagleray.server.fields import CacheSalt, ModelName, Priority, PromptField, ShortText, Timeout, TruncationLimit

PARTS = Feature("truncation of one text of a pair", "leave it out; `truncate_prompt_tokens` limits both together")
POOLING_FATES: Mapping[str, Fate] = {
    **dict.fromkeys(("user", "mm_payload", "input_type"), ACCEPTED),
    **dict.fromkeys(("max_tokens_per_query", "max_tokens_per_doc", "max_chunks_per_doc"), refused(PARTS, 0)),
    "padding": refused(Feature("padding of prompts"), "do_not_pad"),
    "normalize": refused(Feature("this name of `use_activation`", "call it `use_activation`")),
    "chat_template": refused(Feature("templates of requests", "leave it out and start with `--chat-template`")),
    "mm_processor_kwargs": refused(MEDIA, {}),
    "media_io_kwargs": refused(MEDIA, {}),
}
"""Treatment of fields that have no effect on these routes."""


class PoolingFields(msgspec.Struct, kw_only=True):
    """The fields that all bodies have."""

    model: ModelName = None
    request_id: Annotated[ShortText | None, Meta(description="Shown in the answer. Default: X-Request-Id.")] = None
    priority: Priority = None
    cache_salt: CacheSalt = None
    timeout: Timeout | None = None
    truncate_prompt_tokens: TruncationLimit = None
    truncation_side: Annotated[
        TruncationSide | None, Meta(description="Tokens to keep: right (default), the first ones; left, the last ones.")
    ] = None
    use_activation: Annotated[
        bool | None,
        Meta(
            description="Normalize embeddings, and make probabilities of the outputs of classifiers. Default: as the "
            "checkpoint says, else true."
        ),
    ] = None


class PromptsFields(PoolingFields, kw_only=True):
    """The fields of bodies whose prompts get a vector each: `input`, or a conversation."""

    input: PromptField | None = None
    messages: Annotated[Messages | None, Meta(description="A conversation, in place of `input`.")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="Default: true for texts, false for a conversation.")
    ] = None
    add_generation_prompt: Annotated[bool | None, Meta(description="For a conversation. Default: false.")] = None
    continue_final_message: Annotated[bool | None, Meta(description="For a conversation.")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="For a conversation.")] = None
    chat_template: Annotated[
        str | None, Meta(description="For a conversation, where the server takes templates from requests.")
    ] = None


class EncodingFields(PromptsFields, kw_only=True):
    """The fields that say how a vector is written."""

    encoding_format: Annotated[
        Literal["float", "base64"] | None, Meta(description="base64: the bytes of the numbers.")
    ] = None
    embed_dtype: Annotated[Literal["float32", "float16"] | None, Meta(description="For base64.")] = None
    endianness: Annotated[
        Literal["native", "little", "big"] | None,
        Meta(description="For base64; native is that of the server's processor. Default: little."),
    ] = None
    dimensions: Annotated[
        int | None, Meta(description="Keep this many first dimensions, with models that were trained for it.")
    ] = None


class EmbeddingRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """Embed texts."""


class PoolingRequest(EncodingFields, kw_only=True, forbid_unknown_fields=True):
    """Return the vectors of texts."""

    task: Annotated[Literal["embed", "classify"] | None, Meta(description="Default: what the model is served for.")] = (
        None
    )


class ClassificationRequest(PromptsFields, kw_only=True, forbid_unknown_fields=True):
    """Classify texts."""


class ScoringPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """A part of a text."""

    text: str


class ScoringDocument(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A text, as Cohere (`text`) or vLLM (`content`) write it in an object."""

    text: str | None = None
    content: list[ScoringPart] | None = None


ScoringText = str | ScoringDocument
ScoringTexts = ScoringText | list[ScoringText]


class PairFields(PoolingFields, kw_only=True):
    """The fields of bodies with pairs of texts."""

    instruction: Annotated[
        str | None, Meta(description="Variable `instruction` of the template that joins the texts of a pair.")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None, Meta(description="More variables for this template (option `chat_template`).")
    ] = None


class ScoreRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """Score pairs of texts: one text with each of several, or each text with its counterpart.

    The texts are `text_1` and `text_2`, or the same by other names: `queries` and `documents` (or `items`), `data_1`
    and `data_2`.
    """

    text_1: ScoringTexts | None = None
    text_2: ScoringTexts | None = None
    queries: ScoringTexts | None = None
    documents: ScoringTexts | None = None
    items: ScoringTexts | None = None
    data_1: ScoringTexts | None = None
    data_2: ScoringTexts | None = None


class RerankRequest(PairFields, kw_only=True, forbid_unknown_fields=True):
    """Order documents by their relevance for a query."""

    query: ScoringText
    documents: ScoringTexts
    top_n: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="Number of best documents in the answer. 0: all.")
    ] = None
    return_documents: Annotated[bool | None, Meta(description="false: leave out the documents' texts.")] = None


def texts_of(given: ScoringTexts, name: str) -> list[str]:
    """Return the texts of a field. Raises `InvalidRequest`."""
    texts = []
    for index, one in enumerate(given if isinstance(given, list) else [given]):
        if isinstance(one, str):
            texts.append(one)
        elif one.text is not None:
            texts.append(one.text)
        elif one.content is not None:
            texts.append("".join(part.text for part in one.content))
        else:
            raise InvalidRequest(f"`{name}`: entry {index} has neither `text` nor `content`", param=name)
    return texts
