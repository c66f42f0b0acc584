"""Models of GGUF files have the logits of transformers with the numbers of the files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint
from gguf_files import write_gguf
from harness import random_prompt
from model_runs import load, logits_in_chunks
from oracle import Oracle
from ranks import run_ranks, topology
from safetensors.torch import save_file

from eagleray.config.sections import ModelConfig
from eagleray.errors import CheckpointError, ConfigError, WeightsMismatch
from eagleray.hub.gguf.rope import llama3_factors
from eagleray.hub.locate import checkpoint_dir
from eagleray.hub.prepare import prepare_model
from eagleray.kernels.grouped import Encoding, GroupedWeight
from eagleray.kernels.quantized import WeightFormat
from eagleray.models.config_file import ConfigFile
from eagleray.models.gguf_file import GgufFile
from eagleray.models.gguf_weights import GgufWeights
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.stored_weights import WeightRules
from eagleray.models.weights import Cut, Param
from eagleray.parallel.groups import Groups

PROMPT = random_prompt(0, 40, 384)
EXACT = 2e-4
"""Tolerance for logits that are computed in float32 in another order."""
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
"""Sizes of which the blocks of 256 numbers are divisors."""
EXPERTS: dict[str, Any] = {"num_hidden_layers": 2, "moe_intermediate_size": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED: dict[str, Any] = {"rope_theta": 5e3, "factor": 4.0, "original_max_position_embeddings": 32}

VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama F32": ("llama", "F32", {"attention_bias": True, "mlp_bias": True}),
    "llama F16, tied": ("llama", "F16", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama BF16, linear rope": ("llama", "BF16", {"rope_parameters": SCALED | {"rope_type": "linear"}}),
    "llama Q4_K": ("llama", "Q4_K", WIDE),
    "mistral Q4_0, window": ("mistral", "Q4_0", {"sliding_window": 24}),
    "mixtral Q5_0": ("mixtral", "Q5_0", {}),
    "qwen2 Q4_1": ("qwen2", "Q4_1", {}),
    "qwen3 F32, yarn": ("qwen3", "F32", {"rope_parameters": SCALED | {"rope_type": "yarn"}}),
    "qwen3 Q6_K, tied": ("qwen3", "Q6_K", WIDE | {"head_dim": 64}),
    "qwen3_moe Q8_0": ("qwen3_moe", "Q8_0", EXPERTS | {"mlp_only_layers": [1]}),
}


class Written:
    """A GGUF file, the directory made of its header, and a checkpoint with its numbers."""

    def __init__(self, directory: Path, family: str, kind: str, overrides: dict[str, Any], **options: Any) -> None:
        self.plain = make_checkpoint(directory / "plain", family, **overrides)
        self.path = directory / "model.gguf"
        numbers = write_gguf(self.plain, self.path, kind, **options)
        tensors = {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in numbers.items()}
        save_file(tensors, self.plain / "model.safetensors", {"format": "pt"})
        self.directory = unpacked(self.path)


def unpacked(path: Path) -> Path:
    config = prepare_model(ModelConfig(model=str(path), download_dir=str(path.parent / "cache")))
    return checkpoint_dir(config)


@pytest.fixture(scope="module", params=VARIANTS)
def written(request, tmp_path_factory):
    family, kind, overrides = VARIANTS[request.param]
    return Written(tmp_path_factory.mktemp("gguf"), family, kind, overrides)


def test_load_model_float32_has_the_logits_of_transformers(written):
    model = load(written.directory, dtype="float32")
    expected = Oracle(written.plain).logits(PROMPT)
    torch.testing.assert_close(logits_in_chunks(model, PROMPT, 40), expected, atol=EXACT, rtol=0)


def test_load_model_in_groups_is_near_the_decoded_weights(written):
    expected = Oracle(written.plain).logits(PROMPT)
    reported: list[tuple[int, int]] = []
    model = load(written.directory, dtype="bfloat16", on_progress=lambda *now: reported.append(now))
    plain = load(written.plain, dtype="bfloat16")
    found, decoded = (logits_in_chunks(each, PROMPT, 40) for each in (model, plain))
    assert (found - expected).square().mean() < 1.5 * (decoded - expected).square().mean() + 1e-6
    assert model.num_parameters == plain.num_parameters
    assert 0.9 * reported[-1][1] < reported[-2][0] <= reported[-1][1]


@pytest.mark.parametrize(
    ("family", "kind", "overrides"),
    [
        ("llama", "Q8_0", {"num_hidden_layers": 2, "vocab_size": 383}),
        ("qwen3_moe", "Q4_0", EXPERTS | {"tie_word_embeddings": True}),
    ],
)
def test_load_model_on_two_ranks_equals_one(family, kind, overrides, tmp_path):
    written = Written(tmp_path, family, kind, overrides)
    expected = logits_in_chunks(load(written.directory, dtype="float32"), PROMPT, 40)
    in_groups = logits_in_chunks(load(written.directory, dtype="bfloat16"), PROMPT, 40)

    def work(groups: Groups) -> list[torch.Tensor]:
        options = ExpertOptions(dispatch=None if family == "llama" else "all-to-all")
        return [
            logits_in_chunks(load(written.directory, groups=groups, dtype=dtype, experts=options), PROMPT, 13)
            for dtype in ("float32", "bfloat16")
        ]

    exact, rounded = run_ranks(work, topology(tp=2))[0]
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(rounded, in_groups, atol=0.3, rtol=0)


def test_load_model_with_the_rope_of_llama3_has_the_logits_of_transformers(tmp_path):
    rope = LLAMA3 | {"rope_theta": 10_000.0, "original_max_position_embeddings": 8192}
    factors = llama3_factors(10_000.0, 8.0, 8)
    assert factors[0] == 1 and factors[-1] == 8
    overrides = {"rope_parameters": rope, "max_position_embeddings": 16384}
    written = Written(tmp_path, "llama", "F32", overrides, extra={"rope_freqs.weight": factors})
    model = load(written.directory)
    expected = Oracle(written.plain).logits(PROMPT)
    torch.testing.assert_close(logits_in_chunks(model, PROMPT, 40), expected, atol=EXACT, rtol=0)
    assert ConfigFile.read(written.directory).fields["rope_scaling"]["factor"] == 8.0


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file whose tensors have several types, as those of llama.cpp's mixtures do."""
    kinds = {"attn_v": "Q6_K", "ffn_down": "Q6_K", "blk.1.ffn_gate": "F16", "token_embd": "Q8_0"}
    return Written(tmp_path_factory.mktemp("mixed"), "llama", "Q4_K", WIDE, kinds=kinds)


def rules(**options: Any) -> WeightRules:
    return WeightRules(dtype=torch.bfloat16, device=torch.device("cpu"), **options)


def params(*modules: str, rows: int = 256, columns: int = 256, shard: Cut | None = None) -> list[Param]:
    return [Param(f"model.layers.{module}.weight", (rows, columns), shard) for module in modules]


def test_load_weight_of_several_types_keeps_groups(mixed):
    file = GgufFile.find(mixed.directory)
    keeping = GgufWeights(file, rules(kept_formats=frozenset(WeightFormat)))
    decoding = GgufWeights(file, rules())
    queries = params("0.self_attn.q_proj")
    values = params("0.self_attn.v_proj", rows=128)
    down = params("1.mlp.down_proj")
    half = params("1.mlp.down_proj", shard=Cut(1, range(64, 192)))
    odd = params("1.mlp.down_proj", shard=Cut(1, range(8, 128)))
    gate_up = params("1.mlp.gate_proj", "1.mlp.up_proj")
    expected = {
        "queries": (queries, Encoding.INT4, 32),
        "queries, values": ([*queries, *values], Encoding.INT8, 16),
        "down": (down, Encoding.INT8, 16),
        "half": (half, Encoding.INT8, 16),
        "odd": (odd, None, 0),
        "gate, up": (gate_up, None, 0),
    }
    for name, (each, encoding, size) in expected.items():
        found, plain = keeping.load_weight(each), decoding.load_weight(each)
        assert isinstance(plain, torch.Tensor), name
        if encoding is None:
            assert torch.equal(found, plain), name
        else:
            assert isinstance(found, GroupedWeight), name
            assert (found.encoding, found.group_size) == (encoding, size), name
            torch.testing.assert_close(found.dequantize(torch.bfloat16), plain, atol=5e-3, rtol=1e-2, msg=name)


def test_load_embedding_is_decoded_and_head_is_kept(mixed):
    weights = GgufWeights(GgufFile.find(mixed.directory), rules(kept_formats=frozenset(WeightFormat)))
    embedding = Param("model.embed_tokens.weight", (384, 256), Cut(0, range(100, 200)))
    plain, head = weights.load(embedding), weights.load_head(embedding)
    assert isinstance(head, GroupedWeight) and head.encoding is Encoding.INT8
    assert torch.equal(plain, head.dequantize(torch.bfloat16))


def test_load_weight_with_the_integer_minus_128_is_decoded_but_for_experts(tmp_path):
    written = Written(tmp_path, "qwen3_moe", "Q8_0", EXPERTS)
    file = GgufFile.find(written.directory)
    data = np.memmap(written.path, mode="r+")
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"):
        data[file.entries[name].offset + 2] = 128
    weights = GgufWeights(file, rules(kept_formats=frozenset(WeightFormat)))
    queries = weights.load_weight(params("0.self_attn.q_proj", rows=128, columns=64))
    assert isinstance(queries, torch.Tensor)
    with pytest.raises(CheckpointError, match=r"tensor 'blk.0.ffn_up_exps.weight' has the integer -128"):
        weights.load_weight(params("0.mlp.experts.0.up_proj", rows=64, columns=64))


def test_update_of_the_weights_is_refused(mixed):
    model = load(mixed.directory)
    for change in (model.start_update, lambda: model.load_weights([])):
        with pytest.raises(WeightsMismatch, match=r"the weights of a model from a GGUF file, .* cannot be updated"):
            change()


def test_quantization_of_quantized_weights_is_refused_and_of_plain_ones_is_not(mixed, tmp_path):
    with pytest.raises(ConfigError, match=r"quantized weights already \(Q4_K, Q6_K, Q8_0\); drop it"):
        load(mixed.directory, quantization="int8")
    plain = Written(tmp_path, "llama", "BF16", {"num_hidden_layers": 1})
    expected = logits_in_chunks(load(plain.directory), PROMPT, 40)
    found = logits_in_chunks(load(plain.directory, quantization="int8"), PROMPT, 40)
    assert 0 < (found - expected).abs().max() < 1


def test_load_model_refuses_files_that_do_not_fit_their_header(tmp_path):
    written = Written(tmp_path, "llama", "F16", {"num_hidden_layers": 1})
    original = tmp_path / "plain"

    def check(message: str, **options: Any) -> None:
        path = tmp_path / "other.gguf"
        write_gguf(original, path, "F16", **options)
        with pytest.raises(CheckpointError, match=message):
            load(unpacked(path))

    check(r"other.gguf: tensor 'blk.0.ffn_up.weight' of shape \[96, 64\] is missing", drop=("blk.0.ffn_up.weight",))
    check(
        r"tensor 'blk.0.ffn_gate.weight' has the shape \[96, 64\], but the header implies \[80, 64\]",
        fields={"{arch}.feed_forward_length": 80},
    )
    check(r"no place for blk.0.strange.weight; this variant", extra={"blk.0.strange.weight": np.zeros(3, np.float32)})
    shutil.copy(original / "config.json", written.path)
    with pytest.raises(CheckpointError, match=r"model.gguf: has [\d,]+ bytes, but had [\d,]+ when its header was read"):
        load(written.directory)
    written.path.unlink()
    with pytest.raises(CheckpointError, match=r"model.gguf: cannot be read: No such file"):
        load(written.directory)
