"""Small tokenizers of the kinds that checkpoints have, trained on a few lines, and checkpoint directories with them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from eagleray.client.text.chat_template import ChatTemplate
from eagleray.client.text.tokenizer import Tokenizer as ClientTokenizer

TEXTS = [
    "The quick brown fox jumps over the lazy dog. It doesn't matter, does it?",
    "def main(): return [x for x in range(10) if x % 2 == 0]",
    "Größe, naïve café, señor, 北京 東京 привет мир 😀 👍🏽 e\u0301 مرحبا",
    "hello world hello there hello again, and again, and again",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def byte_level_json() -> str:
    """Tokenizer like Qwen's: NFC, byte-level BPE, no tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer.to_str()


@cache
def byte_level_with_bos_json() -> str:
    """Tokenizer like that of Llama 3: a first token before every text."""
    tokenizer = Tokenizer.from_str(byte_level_json())
    tokenizer.add_special_tokens(["<|begin|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    return tokenizer.to_str()


@cache
def byte_fallback_json() -> str:
    """Tokenizer like those of Llama 2 and Mistral: BPE over characters, spaces as ▁, unknown characters as bytes."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=150, show_progress=False)
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = [*SPECIAL, *byte_tokens(), *model["vocab"]]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    return sentencepiece_like(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)).to_str()


@cache
def unigram_json() -> str:
    """Tokenizer like the sentencepiece models that are not BPE."""
    trained = Tokenizer(models.Unigram())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=150, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    trained.train_from_iterator([text for text in TEXTS if text.isascii()], trainer)
    pieces = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"] if entry[0] != "<unk>"]
    vocab = [(token, 0.0) for token in [*SPECIAL, *byte_tokens()]] + pieces
    return sentencepiece_like(models.Unigram(vocab, unk_id=0, byte_fallback=True)).to_str()


@cache
def words_json() -> str:
    """Tokenizer of whole words, decoded with spaces between them, which `clean_up` then removes before punctuation."""
    words = ["the", "dog", "he", "is", "n't", "'s", "'", ".", ",", "!", "?", "'m", "'ve", "'re", "n", "s"]
    vocab = {word: index for index, word in enumerate(["<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer.to_str()


def byte_tokens() -> list[str]:
    return [f"<0x{byte:02X}>" for byte in range(256)]


def sentencepiece_like(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


KINDS = {
    "byte_level": byte_level_json,
    "byte_level_with_bos": byte_level_with_bos_json,
    "byte_fallback": byte_fallback_json,
    "unigram": unigram_json,
    "words": words_json,
}


def load(kind: str) -> ClientTokenizer:
    """Return a tokenizer of this kind, without files."""
    return ClientTokenizer(
        Tokenizer.from_str(KINDS[kind]()),
        eos_token_ids=(2,),
        chat_template=ChatTemplate({}, {}),
        clean_up_tokenization_spaces=kind == "words",
    )


def write_checkpoint(directory: Path, kind: str = "byte_level", **files: object) -> Path:
    """Write a directory with this tokenizer. `files`: contents of the other JSON files, by name without suffix."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(KINDS[kind](), encoding="utf-8")
    defaults = {"config": {"model_type": "qwen3"}, "tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast"}}
    for name, content in (defaults | files).items():
        if content is not None:
            (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return directory
