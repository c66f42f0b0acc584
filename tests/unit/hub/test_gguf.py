"""GGUF files as models: their names, and the files of a checkpoint that are made of their headers."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from tokenizers import Tokenizer as Backend

from eagleray.client.text.generation_config import default_sampling, model_eos_token_ids
from eagleray.client.text.tokenizer import Tokenizer
from eagleray.config.resolve import DEMO_MODEL_DIR, served_names
from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError
from eagleray.hub.gguf.pre_tokenizers import PRE_TOKENIZERS
from eagleray.hub.gguf.sentence_pieces import SPACE
from eagleray.hub.locate import checkpoint_dir, model_root, tokenizer_dir
from eagleray.hub.model_json import read_config
from eagleray.hub.prepare import fetch_model, prepare_model
from eagleray.hub.replacement import prepare_replacement

TEXTS = (
    "The quick brown fox doesn't jump over 1234567 lazy dogs, does it?\r\n\r\n  Two  spaces,\ttabs.",
    "def main():\n    return [x for x in range(10) if x % 2 == 0]\n",
    "<|im_start|>user\nGrüße aus Köln: 日本語、東京 👋🏽 🎉<|im_end|>\n<|endoftext|> <tool_call> cafe\u0301",
    "",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain"), "llama", num_hidden_layers=1)


@pytest.fixture
def file(plain, tmp_path) -> Path:
    write_gguf(plain, tmp_path / "model.gguf", "Q8_0")
    return tmp_path / "model.gguf"


def prepared(name: str | Path, **options: Any) -> ModelConfig:
    return prepare_model(ModelConfig(model=str(name), **options))


def test_prepare_model_gguf_makes_the_files_of_a_checkpoint_once(file, cache):
    model = prepared("model.gguf", revision="any")
    assert (model.model, served_names(model), model_root(model)) == (str(file), ["model.gguf"], str(file))
    directory = checkpoint_dir(model)
    assert directory.is_relative_to(cache)
    assert tokenizer_dir(model) == directory
    before = {path.name: path.stat().st_mtime_ns for path in directory.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < before.keys()
    assert prepare_model(model) == model
    fetch_model(model, timeout=0, with_weights=True)
    assert {path.name: path.stat().st_mtime_ns for path in directory.iterdir()} == before


def test_prepare_model_gguf_describes_the_model(file, plain):
    found = read_config(prepared(file))
    expected = json.loads((plain / "config.json").read_text())
    names = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "rms_norm_eps")
    for name in (*names, "num_attention_heads", "num_key_value_heads", "max_position_embeddings", "eos_token_id"):
        assert found[name] == expected[name], name
    assert found["rope_theta"] == expected["rope_parameters"]["rope_theta"]
    assert (found["dtype"], found["tie_word_embeddings"]) == ("bfloat16", False)


def test_prepare_model_directory_with_one_gguf_file_is_that_file(file, plain):
    assert prepared(".").model == str(file)
    shutil.copy(file, file.with_name("other.GGUF"))
    with pytest.raises(CheckpointError, match=r"2 GGUF files \(model.gguf, other.GGUF\); give the path of one of them"):
        prepared(".")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(plain / name, file.parent)
    assert prepared(".").revision is None


def test_prepare_model_gguf_that_was_replaced_has_other_files(file, plain):
    before = prepared(file)
    write_gguf(plain, file, "Q8_0", fields={"llama.context_length": 512})
    after = prepared(file)
    assert after.revision != before.revision
    assert read_config(after)["max_position_embeddings"] == 512
    with pytest.raises(CheckpointError, match=r"model.gguf: differs from the file with which the deployment started"):
        fetch_model(before, timeout=0, with_weights=True)


def test_prepare_model_gguf_in_a_cache_that_cannot_be_written(file, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointError, match="choose another cache with `--download-dir`"):
        prepared(file, download_dir=str(tmp_path / "taken"))


def test_prepare_replacement_of_one_gguf_file_by_another(file, plain, tmp_path):
    start = prepared(file)
    write_gguf(plain, tmp_path / "next.gguf", "F16")
    changes = prepare_replacement(start, {"model": "next.gguf"})
    assert changes["model"] == str(tmp_path / "next.gguf")
    assert len(changes["revision"]) == 40


def test_tokenizer_of_a_gguf_file_equals_the_one_it_was_made_of(tmp_path, plain):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL_DIR / name, tmp_path / name)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(plain / name, tmp_path / name)
    vocab_size = {"vocab_size": 4100}
    (tmp_path / "config.json").write_text(json.dumps(json.loads((tmp_path / "config.json").read_text()) | vocab_size))
    write_gguf(tmp_path, tmp_path / "model.gguf", "F16")
    model = prepared(tmp_path / "model.gguf")
    found, expected = Tokenizer.load(tokenizer_dir(model)), Tokenizer.load(DEMO_MODEL_DIR)
    assert (found.vocab_size, found.special_ids) == (expected.vocab_size, expected.special_ids)
    assert found.eos_token_ids == model_eos_token_ids(model) == (2,)
    assert found.chat_template == expected.chat_template
    corpus = [*TEXTS, (DEMO_MODEL_DIR / "MODEL_CARD.md").read_text()]
    for text in corpus:
        ids = found.encode(text, add_special_tokens=True)
        if text == TEXTS[2]:  # Qwen's normal form is in none of the header's fields
            text = text.replace("e\u0301", "é")
        assert ids == expected.encode(text, add_special_tokens=True)
        assert found.decode(ids, skip_special_tokens=False) == text
        assert found.decode(ids, skip_special_tokens=True) == expected.decode(ids, skip_special_tokens=True)
    assert [found.token_bytes(i) for i in range(4100)] == [expected.token_bytes(i) for i in range(4100)]


def test_tokenizer_of_a_gguf_file_has_the_tokens_around_a_text_and_several_templates(file, plain):
    fields = {
        "tokenizer.ggml.pre": "llama-bpe",
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eot_token_id": 0,
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "general.sampling.temp": 0.6,
        "general.sampling.top_k": 20,
    }

    def load(**more: Any) -> tuple[ModelConfig, Tokenizer]:
        write_gguf(plain, file, "F16", fields=fields | more)
        model = prepared(file)
        return model, Tokenizer.load(tokenizer_dir(model))

    model, tokenizer = load()
    text = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello", add_special_tokens=True) == [1, *text]
    assert model_eos_token_ids(model) == tokenizer.eos_token_ids == (2, 0)
    sampling = default_sampling(model)
    assert (sampling["temperature"], sampling["top_k"]) == (0.6, 20)
    assert tokenizer.chat_template == "{{ tools }}"
    _, tokenizer = load(**{"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True})
    assert tokenizer.encode("hello", add_special_tokens=True) == [*text, 2]


def sentence_pieces(text: str, pieces: dict[str, float], ids: dict[str, int]) -> list[int]:
    """Return the tokens of SentencePiece's BPE: of all neighbours those of the highest score are merged first."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        pairs = [(pieces.get(a + b, -np.inf), -i) for i, (a, b) in enumerate(itertools.pairwise(symbols))]
        if not pairs or (best := max(pairs))[0] == -np.inf:
            break
        place = -best[1]
        symbols[place : place + 2] = ["".join(symbols[place : place + 2])]
    found = []
    for symbol in symbols:
        found += [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
    return found


def test_tokenizer_of_sentence_pieces_merges_by_their_scores(file, plain):
    letters = sorted(set("▁abcdeflohrtw"))
    merged = ["▁t", "he", "▁the", "ll", "el", "lo", "llo", "▁he", "▁hello", "or", "wor", "▁w", "ab", "cab", "bc", "▁▁"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(tokens) - 259)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(tokens) - 259)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.merges": None,
        "tokenizer.ggml.bos_token_id": 1,
    }
    write_gguf(plain, file, "F16", fields=fields)
    tokenizer = Tokenizer.load(tokenizer_dir(prepared(file)))
    pieces = dict(zip(tokens[259:], scores[259:], strict=True))
    ids = {token: index for index, token in enumerate(tokens)}
    for text in ("hello the world", "abcabc cab bc", "  hello  w", "the café 東京 👋", "lllllo"):
        found = tokenizer.encode(text, add_special_tokens=True)
        assert found == [1, *sentence_pieces(text, pieces, ids)], text
        assert tokenizer.decode(found, skip_special_tokens=True) == text
    assert tokenizer.encode("a</s>b", add_special_tokens=False)[2] == 2


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("llama-bpe", ["It", "'S", "Ġ", "123", "45", "Ġ(", "ab", ")\n\n", "ĠĠ", "ĠAbcD", "."]),
        ("qwen2", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "ab", ")\n\n", "ĠĠ", "ĠAbcD", "."]),
        ("gpt-2", ["It", "'", "S", "Ġ12345", "Ġ(", "ab", ")", "\n\nĠĠ", "ĠAbcD", "."]),
        ("smollm", ["It", "'", "S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "ab", ")", "\n\nĠĠ", "ĠAbcD", "."]),
        ("tekken", ["It", "'S", "Ġ", "1", "2", "3", "4", "5", "Ġ(", "ab", ")\n\n", "ĠĠ", "ĠAbc", "D", "."]),
    ],
)
def test_pre_tokenizers_divide_a_text_as_their_families_do(name, pieces):
    fields = {"type": "BPE", "vocab": {}, "merges": []}
    pre = PRE_TOKENIZERS[name].pre_tokenizer
    backend = Backend.from_str(
        json.dumps({"version": "1.0", "added_tokens": [], "pre_tokenizer": pre, "model": fields})
    )
    found = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str("It'S 12345 (ab)\n\n   AbcD.")]
    assert found == [piece.replace("\n", "Ċ") for piece in pieces]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": "gemma2"}, "'gemma2' is not supported; supported are llama, qwen2, qwen3, qwen3moe"),
        ({"llama.block_count": None}, "the header lacks the field of which `num_hidden_layers` is made"),
        ({"llama.rope.dimension_count": 8}, "only models that rotate the whole head of 16 are served"),
        ({"llama.attention.value_length": 32}, "16 features of keys and 32 of values"),
        ({"llama.attention.head_count_kv": [2, 1]}, "`attention.head_count_kv` differs between layers"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "rope scaling 'longrope' is not"),
        ({"llama.context_length": "long", "llama.attention.sliding_window": 9}, "is of another type than it should be"),
        ({"split.count": 3}, "is one of 3 parts of a model; merge them with `llama-gguf-split --merge`"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "'deepseek-llm' is not supported; .* with the option `tokenizer`"),
        ({"tokenizer.ggml.pre": None}, "the pre-tokenizer None is not supported; supported are gpt-2, llama-bpe"),
        ({"tokenizer.ggml.model": "t5"}, "the tokenizer 't5' is not supported; supported are gpt2 and llama"),
        ({"tokenizer.ggml.tokens": None}, "`tokenizer.ggml.tokens` must be a list of texts, but it is None"),
        ({"tokenizer.ggml.token_type": [1, 2]}, "`tokenizer.ggml.token_type` must be a list of 384 numbers"),
        ({"tokenizer.ggml.merges": ["a"]}, r"must be two tokens, but one is \['a'\]"),
        ({"tokenizer.ggml.eos_token_id": 999}, "names the token 999, but it has 384 tokens"),
    ],
)
def test_prepare_model_refuses_a_header_with_one_sentence(fields, message, file, plain):
    write_gguf(plain, file, "F16", fields=fields)
    with pytest.raises(CheckpointError, match=f"model.gguf: .*{message}"):
        prepared(file)


def test_prepare_model_tokenizer_of_another_place_makes_up_for_one_that_is_not_supported(file, plain):
    write_gguf(plain, file, "F16", fields={"tokenizer.ggml.pre": "deepseek-llm"})
    model = prepared(file, tokenizer=str(plain))
    assert tokenizer_dir(model) == plain
    assert not (checkpoint_dir(model) / "tokenizer.json").exists()
    assert prepared(file, skip_tokenizer_init=True).model == str(file)
    with pytest.raises(CheckpointError, match="the pre-tokenizer 'deepseek-llm'"):
        prepared(file)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.2, 0.9])
def test_prepare_model_refuses_a_truncated_file(share, file):
    os.truncate(file, int(file.stat().st_size * share))
    with pytest.raises(CheckpointError, match=r"model.gguf: is not a complete GGUF file .*; it may be truncated"):
        prepared(file)


def test_prepare_model_refuses_other_bytes_and_types(file, plain):
    file.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"is not a complete GGUF file \(it begins with b'PK.* in place of"):
        prepared(file)
    write_gguf(plain, file, "F16", extra={"blk.0.strange": np.zeros(3)})
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.strange' is of the type F64; supported are F32, F16"):
        prepared(file)
    write_gguf(plain, file, "F16", drop=("token_embd.weight",))
    with pytest.raises(CheckpointError, match=r"tensor 'token_embd.weight' is missing"):
        prepared(file)
