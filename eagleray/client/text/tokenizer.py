"""Converts text to token ids and back by the checkpoint's tokenizer.json.

The `tokenizers` library does the work; this module adds the other files of the checkpoint, the chat template, and the
exact bytes of a token. Immutable once loaded, and usable from several threads.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer as Backend

from eagleray.client.text.chat_template import ChatTemplate, RenderBudget, read_template
from eagleray.client.text.end_tokens import eos_token_ids
from eagleray.client.text.template_form import ContentFormat
from eagleray.client.text.tokenizer_files import chat_template_source, load_backend, named_tokens, read_tokenizer_config
from eagleray.errors import CheckpointError, InvalidRequest

TruncationSide = Literal["left", "right"]


class Tokenizer:
    """The tokenizer of one checkpoint. Load it with `load`."""

    def __init__(
        self,
        backend: Backend,
        *,
        eos_token_ids: tuple[int, ...],
        chat_template: ChatTemplate,
        clean_up_tokenization_spaces: bool = False,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        decoders = _decoder_kinds(backend)
        self.eos_token_ids = eos_token_ids
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        """Number of tokens, added ones included. The model's own vocabulary may be larger, because of padding."""
        self.is_byte_level = decoders == ["ByteLevel"]
        """Whether every token is a sequence of bytes, and the text of several is their bytes decoded together."""
        self.has_byte_fallback = "ByteFallback" in decoders
        """Whether tokens `<0x00>` … `<0xFF>` are single bytes, and a run of them is decoded together."""
        # As in transformers 5: the clean-up was made for WordPiece, and would corrupt the text of a BPE model.
        self.cleans_up = clean_up_tokenization_spaces and type(backend.model).__name__ != "BPE"
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        """Ids of the tokens that `skip_special_tokens` leaves out of texts."""
        self._anchor: list[int] = backend.encode("a", add_special_tokens=False).ids
        self._anchor_length = len(self.decode_raw(self._anchor, skip_special_tokens=False))
        self._bytes: dict[int, bytes] = {}

    @functools.cached_property
    def max_token_chars(self) -> int:
        """Largest number of characters that one token stands for."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        return longest if self._backend.normalizer is None else longest * MAX_NORMALIZED_CHARS

    @classmethod
    def load(
        cls, directory: Path, *, chat_template: Path | None = None, content_format: ContentFormat = "auto"
    ) -> Tokenizer:
        """Load the tokenizer of a checkpoint. `chat_template` is the file of a template to use in place of its own,
        `content_format` the form of messages in the template.

        Raises `CheckpointError` for a file that is missing or damaged, `ConfigError` for a wrong `chat_template`.
        """
        config = read_tokenizer_config(directory)
        try:
            backend = load_backend(directory, config)
            named = named_tokens(config)
            templates = chat_template_source(directory, config)
        except (AttributeError, KeyError, TypeError) as error:  # JSON of another shape
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: its tokens or chat templates are not as they should be "
                f"({type(error).__name__}: {error})"
            ) from None
        if chat_template is not None:
            templates = {"default": read_template(chat_template)}
        eos = eos_token_ids(directory)
        if not eos and (token_id := backend.token_to_id(named.get("eos_token", ""))) is not None:
            eos = (token_id,)
        return cls(
            backend,
            eos_token_ids=eos,
            chat_template=ChatTemplate(templates, named, content_format),
            clean_up_tokenization_spaces=bool(config.get("clean_up_tokenization_spaces", False)),
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids. `add_special_tokens`: with the tokens that the model expects around a text.

        Raises `InvalidRequest` if `text` is no text, or if the tokenizer fails on it.
        """
        with _explaining_failures(text):
            if len(text) <= SHORT_TEXT_CHARS:
                return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_part(
        self, text: str, max_tokens: int, *, side: TruncationSide | None, add_special_tokens: bool
    ) -> list[int]:
        """Return at most `max_tokens` token ids of `text`. Raises `InvalidRequest` as `encode` does.

        `side` left cuts off the first ids, and right the last ones, special tokens included. None cuts off the first
        ids of the text and keeps the special tokens. Only the kept part of a long text is tokenized.
        """
        keeps_start = side == "right"
        num_chars = max(SHORT_TEXT_CHARS, EXPECTED_TOKEN_CHARS * max_tokens)
        longest = min(len(text), max_tokens * self.max_token_chars)
        while True:
            num_chars = min(num_chars, longest)
            part = text[:num_chars] if keeps_start else text[len(text) - num_chars :]
            with _explaining_failures(part):
                encoding = self._backend.encode_batch([part], add_special_tokens=False)[0]
            if num_chars == longest or len(encoding) > max_tokens + CUT_MARGIN_TOKENS:
                break
            num_chars *= 2
        if side is None:
            num_special = self._backend.num_special_tokens_to_add(False) if add_special_tokens else 0
            encoding.truncate(max(0, max_tokens - num_special), direction="left")
            encoding = self._backend.post_process(encoding, None, add_special_tokens)
        elif add_special_tokens:
            encoding = self._backend.post_process(encoding, None, True)
        ids = encoding.ids
        return ids[:max_tokens] if keeps_start else ids[max(0, len(ids) - max_tokens) :]

    def offsets(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the beginning and the end of each token in `text`, in characters; None if `token_ids` are not the
        tokens of `text`, with or without special tokens around them."""
        with _explaining_failures(text):
            for add_special_tokens in (False, True):
                encoding = self._backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]
                if encoding.ids == token_ids:
                    return list(encoding.offsets)
        return None

    def to_json(self) -> str:
        """Return the tokenizer as a tokenizer.json, with the tokens that other files add."""
        return self._backend.to_str()

    def count_tokens(self, text: str) -> int:
        """Return the number of tokens of `text`, without special ones. Releases the GIL.

        Raises `InvalidRequest` as `encode` does.
        """
        with _explaining_failures(text):
            return len(self._backend.encode_batch_fast([text], add_special_tokens=False)[0])

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens. Ids that are no token have none; bytes that are no text become U+FFFD."""
        return self.clean_up(self.decode_raw(ids, skip_special_tokens=skip_special_tokens))

    def decode_raw(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of the tokens before `clean_up`."""
        try:
            if len(ids) <= SHORT_TEXT_CHARS:
                return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
            return self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        except (OverflowError, TypeError):
            raise InvalidRequest("token ids must be integers from 0 on that fit into 32 bits") from None

    def clean_up(self, text: str) -> str:
        """Remove the spaces that tokenization put before punctuation, if this tokenizer is of the kind that does so."""
        if self.cleans_up:
            for old, new in CLEAN_UPS:
                text = text.replace(old, new)
        return text

    def token_to_text(self, token_id: int) -> str:
        """Return the text of one token as it is within a text: a leading space is kept."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be only a part of a character. Empty for an id that is no token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._bytes_of(token_id)
        return found

    def token_name(self, token_id: int) -> str:
        """Return the token as the vocabulary spells it, such as "Ġis". Empty for an id that is no token."""
        return self._backend.id_to_token(token_id) or ""

    def special_ids_of(self, texts: Iterable[str]) -> list[int]:
        """Return the ids of those of these texts that are special tokens."""
        ids = map(self._backend.token_to_id, texts)
        return [token_id for token_id in ids if token_id in self.special_ids]

    def token_id(self, name: str) -> int | None:
        """Return the id of the token that the vocabulary spells like this; None if there is no such token."""
        token_id: int | None = self._backend.token_to_id(name)
        return token_id

    def is_token(self, token_id: int) -> bool:
        """Whether the id is a token: the model's vocabulary may be larger than the tokenizer's."""
        return self._backend.id_to_token(token_id) is not None

    def byte_of(self, token_id: int) -> int | None:
        """Return the byte that a byte-fallback token stands for; None for other tokens."""
        token = self._backend.id_to_token(token_id) if self.has_byte_fallback else None
        match = BYTE_TOKEN.fullmatch(token) if token else None
        return int(match[1], 16) if match else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        budget: RenderBudget | None = None,
    ) -> str:
        """Return the prompt for a conversation. Encode it without special tokens, because the template writes them.

        `chat_template`: a template to use in place of the model's.

        Raises `InvalidRequest` if there is no template, if a message is not made of text, or if the template raises;
        `OverBudget` if the template exceeds the `budget`.
        """
        return self._chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            documents=documents,
            chat_template_kwargs=chat_template_kwargs,
            source=chat_template,
            budget=budget,
        )

    @property
    def chat_template(self) -> str:
        """Source of the model's chat template, that for tools if it has one of its own; empty without a template."""
        return self._chat_template.source

    def template_uses(self, variables: Iterable[str]) -> bool:
        """Whether the model's chat template has one of these variables."""
        return any(map(self._chat_template.uses, variables))

    def _bytes_of(self, token_id: int) -> bytes:
        if self.is_byte_level:
            return _byte_level_bytes(self._backend.id_to_token(token_id) or "")
        byte = self.byte_of(token_id)
        if byte is not None:
            return bytes([byte])
        # Decoded after another token, because some decoders treat the first one in a special way.
        text = self.decode_raw([*self._anchor, token_id], skip_special_tokens=False)
        return text[self._anchor_length :].encode()


SHORT_TEXT_CHARS = 4096
"""Longer texts are tokenized by the library's call for batches, which releases the GIL. Its side effect rules it out
for short ones: the library warns a program that forks later."""

EXPECTED_TOKEN_CHARS = 8
"""Characters for each token that is kept of a long text, at first: more than most texts need."""
CUT_MARGIN_TOKENS = 64
"""Tokens at a cut of a long text, which may differ from those of the whole text and are not kept."""

MAX_NORMALIZED_CHARS = 4
"""Most characters that a normalizer combines into one, such as a letter and its accents."""


@contextlib.contextmanager
def _explaining_failures(text: Any) -> Iterator[None]:
    """Turn the library's exceptions for `text` into `InvalidRequest`."""
    try:
        yield
    except TypeError:
        if not isinstance(text, str):
            raise InvalidRequest(f"a text is needed, but got {type(text).__name__}", param="prompt") from None
        raise InvalidRequest(
            "the text is not valid Unicode: it has half of a surrogate pair, which no token stands for",
            param="prompt",
        ) from None
    except BaseException as error:
        # A panic of the library is no `Exception`, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidRequest(
            f"the tokenizer fails on this text of {len(text)} characters ({error}); it may repeat one character too "
            "often",
            param="prompt",
        ) from None


BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
CLEAN_UPS = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)


def _decoder_kinds(backend: Backend) -> list[str]:
    """Return the kinds of the decoders that make text of tokens, in order."""
    if backend.decoder is None:
        return []
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    return [decoder["type"] for decoder in state.get("decoders", [state])]


def _byte_characters() -> dict[str, int]:
    """Return the byte of each visible character that byte-level tokenizers write (Radford et al., 2019, GPT-2).

    Printable characters of Latin-1 stand for themselves, and the characters from U+0100 on for the other bytes.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + index): byte for index, byte in enumerate(hidden)}


BYTE_OF_CHARACTER = _byte_characters()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:  # an added token stands for its own text
        return token.encode()
