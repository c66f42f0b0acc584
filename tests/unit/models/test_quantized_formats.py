"""Checkpoints of GPTQ, AWQ, compressed-tensors and FP8 with a scale for each tensor or output: their weights are the
numbers of the formats' definitions, whether they are decoded or kept in few bits, and however they are cut."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from harness import random_prompt
from kernel_numbers import multiplied_numbers
from model_runs import load, logits_in_chunks
from oracle import Oracle
from quantized_checkpoints import WEIGHTS
from quantized_packers import AWQ, CASES, FP8_INPUTS, GPTQ, INT8_INPUTS, Case, case, scheme, write_packed_checkpoint
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagleray.errors import CheckpointError, ConfigError, WeightsMismatch
from eagleray.kernels.backend import Operation
from eagleray.kernels.choose import ModelTraits, choose_backend
from eagleray.kernels.cpu.backend import CpuBackend
from eagleray.kernels.grouped import Encoding, GroupedWeight
from eagleray.kernels.quantized import Fp8Weight, LoadedWeight, RowParts, WeightFormat
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models import registry
from eagleray.models.config_file import ConfigFile
from eagleray.models.loading import CheckpointWeights
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.quantized_formats.choose import Fp8Blocks, read_quantization
from eagleray.models.stored_weights import WeightRules
from eagleray.models.weights import Cut, Param
from eagleray.parallel.groups import Groups

EXACT = 1e-4
PROMPT = random_prompt(0, 40, 384)
ROWS, COLUMNS = 48, 96
CPU = torch.device("cpu")

by_name = pytest.mark.parametrize("form", CASES, ids=lambda form: form.name)


def config_of(form: Case) -> ConfigFile:
    return ConfigFile(Path("config.json"), {"quantization_config": form.config})


def open_weights(directory: Path, form: Case, **rules: Any) -> CheckpointWeights:
    stored = read_quantization(config_of(form))
    assert stored is not None and not isinstance(stored, Fp8Blocks)
    return CheckpointWeights(directory, WeightRules(device=CPU, stored_format=stored, **rules))


def write_modules(directory: Path, form: Case, num_modules: int) -> list[Tensor]:
    """Write a file with the modules "0", "1", ..., and return the numbers of their weights."""
    torch.manual_seed(0)
    tensors, exact = {}, []
    for module in range(num_modules):
        packed, numbers = form.pack(torch.randn(ROWS, COLUMNS) + 0.2)
        tensors |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in packed.items()}
        exact.append(numbers)
    save_file(tensors, directory / WEIGHTS)
    return exact


def decoded(weight: LoadedWeight) -> Tensor:
    assert not isinstance(weight, RowParts)
    return weight if isinstance(weight, Tensor) else weight.dequantize(torch.float32)


CUTS = [
    None,
    Cut(0, range(16, 32)),
    Cut(0, range(3, 13)),
    Cut(0, range(48, 48)),
    Cut(1, range(32, 96)),
    Cut(1, range(40, 61)),
]


@by_name
def test_load_quantized_weight_equals_its_definition(form, tmp_path):
    (exact,) = write_modules(tmp_path, form, 1)
    with open_weights(tmp_path, form, dtype=torch.float32) as weights:
        for cut in CUTS:
            expected = exact if cut is None else cut.of(exact)
            assert torch.equal(weights.load(Param("0.weight", (ROWS, COLUMNS), cut)), expected)


@by_name
def test_load_weight_keeps_bits_and_numbers(form, tmp_path, caplog):
    exact = write_modules(tmp_path, form, 3)
    library = choose_backend(CPU, ModelTraits(torch.bfloat16, [COLUMNS], 64), "auto")
    assert isinstance(library, CpuBackend)
    x = torch.randn(5, COLUMNS).bfloat16()
    with open_weights(tmp_path, form, dtype=torch.bfloat16, kept_formats=frozenset(WeightFormat)) as weights:
        for cut in CUTS[:3]:
            expected = torch.cat([each if cut is None else cut.of(each) for each in exact])
            found = weights.load_weight([Param(f"{index}.weight", (ROWS, COLUMNS), cut) for index in range(3)])
            is_kept = form.name not in ("gptq-desc-act", "fp8-block")
            assert isinstance(found, GroupedWeight | Fp8Weight) == is_kept
            if not is_kept:
                assert torch.equal(decoded(found), expected.bfloat16())
                continue
            assert torch.equal(decoded(found), expected)
            product = library.pack_linear(found, None)
            assert product.grouping is not None
            torch.testing.assert_close(product(x), x.float() @ multiplied_numbers(expected).t(), atol=1e-3, rtol=1e-4)
    assert len(caplog.messages) == (0 if is_kept else 1)


@pytest.mark.parametrize("name", ["gptq", "gptq-8", "awq", "w4a16-asym", "w8a16", "w8a8", "fp8-channel"])
def test_load_weight_cut_of_columns_is_kept_between_groups(name, tmp_path, caplog):
    (exact,) = write_modules(tmp_path, case(name), 1)
    with open_weights(tmp_path, case(name), dtype=torch.bfloat16, kept_formats=frozenset(WeightFormat)) as weights:
        kept = weights.load_weight([Param("0.weight", (ROWS, COLUMNS), Cut(1, range(32, 96)))])
        assert isinstance(kept, GroupedWeight | Fp8Weight)
        assert torch.equal(decoded(kept), exact[:, 32:])
        assert not caplog.messages
        if name != "fp8-channel":
            for _ in range(2):
                found = weights.load_weight([Param("0.weight", (ROWS, COLUMNS), Cut(1, range(8, 72)))])
                is_one_group = name in ("gptq-8", "w8a16", "w8a8")
                assert isinstance(found, Tensor) != is_one_group
                numbers = exact[:, 8:72] if is_one_group else exact[:, 8:72].bfloat16().float()
                assert torch.equal(decoded(found).float(), numbers)
            assert len(caplog.messages) == (0 if is_one_group else 1)


def test_load_weight_int8_of_all_values_is_kept(tmp_path):
    values = torch.arange(-128, 128, dtype=torch.int16).to(torch.int8).repeat(2, 1)
    scales = torch.tensor([[0.5], [0.25]])
    save_file({"0.weight": values, "0.weight_scale": scales}, tmp_path / WEIGHTS)
    with open_weights(tmp_path, case("w8a8"), dtype=torch.bfloat16, kept_formats=frozenset(WeightFormat)) as weights:
        found = weights.load_weight([Param("0.weight", (2, 256))])
    assert isinstance(found, GroupedWeight) and found.encoding is Encoding.HALF_INT8
    assert torch.equal(decoded(found), values.float() * scales)


def test_load_weight_beside_a_plain_one_is_decoded(tmp_path):
    (exact,) = write_modules(tmp_path, case("awq"), 1)
    plain = torch.randn(8, COLUMNS).bfloat16()
    save_file(load_file(tmp_path / WEIGHTS) | {"1.weight": plain}, tmp_path / WEIGHTS)
    params = [Param("0.weight", (ROWS, COLUMNS)), Param("1.weight", (8, COLUMNS))]
    with open_weights(tmp_path, case("awq"), dtype=torch.bfloat16, kept_formats=frozenset(WeightFormat)) as weights:
        found = weights.load_weight(params)
    assert isinstance(found, Tensor) and torch.equal(found, torch.cat((exact.bfloat16(), plain)))


# ---- models


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("llama", form.name) for form in CASES),
        ("qwen2", "gptq"),
        ("qwen3", "w8a8"),
        ("qwen3_moe", "gptq-sym"),
        ("mixtral", "awq"),
        ("deepseek_v3", "fp8-own-channel"),
    ],
)
def test_load_model_equals_transformers_on_dequantized_weights(family, name, tmp_path):
    fields = {"kv_lora_rank": 32, "q_lora_rank": 32} if family == "deepseek_v3" else {}
    small, plain = write_packed_checkpoint(tmp_path / "plain", family, tmp_path / "small", case(name), **fields)
    reported: list[tuple[int, int]] = []
    model = load(small, on_progress=lambda *now: reported.append(now))
    logits, expected = logits_in_chunks(model, PROMPT, 40), Oracle(plain).logits(PROMPT)
    torch.testing.assert_close(logits, expected, atol=EXACT, rtol=0)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    assert model.num_parameters == load(plain).num_parameters
    assert 0.9 * reported[-1][1] < reported[-2][0] <= reported[-1][1]


class GroupKeepingBackend(TorchBackend):
    """Plain torch that keeps all formats, and decodes a weight when it makes a product."""

    kept_formats = frozenset(WeightFormat)

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.num_kept = 0

    def linear(self, weight: LoadedWeight, bias: Tensor | None) -> Operation:
        assert not isinstance(weight, RowParts)
        self.num_kept += not isinstance(weight, Tensor)
        return super().linear(weight if isinstance(weight, Tensor) else weight.dequantize(self._dtype), bias)


@pytest.mark.parametrize(
    ("family", "name", "dispatch"),
    [
        ("llama", "gptq", None),
        ("llama", "w4a16-asym", None),
        ("qwen3_moe", "awq", None),
        ("qwen3_moe", "w8a8", "all-to-all"),
        ("deepseek_v3", "fp8-channel", "all-to-all"),
    ],
)
def test_load_model_kept_on_two_ranks_equals_decoded(family, name, dispatch, tmp_path, monkeypatch):
    small, plain = write_packed_checkpoint(tmp_path / "plain", family, tmp_path / "small", case(name))
    made: list[GroupKeepingBackend] = []

    def choose(device: torch.device, model: ModelTraits, *options: object) -> GroupKeepingBackend:
        made.append(GroupKeepingBackend(model.dtype))
        return made[-1]

    monkeypatch.setattr(registry, "choose_backend", choose)

    def work(groups: Groups) -> list[Tensor]:
        options = {"dtype": "bfloat16", "groups": groups, "experts": ExpertOptions(dispatch=dispatch)}
        return [logits_in_chunks(load(each, **options), PROMPT, 13) for each in (small, plain)]

    for kept, expected in run_ranks(work, topology(tp=2)):
        assert torch.equal(kept, expected)
    assert sum(backend.num_kept > 0 for backend in made) == 2


@pytest.mark.parametrize(("family", "name"), [("llama", "w8a8"), ("qwen3_moe", "gptq-sym"), ("qwen3_moe", "w8a16")])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_load_model_on_a_cpu_takes_fewer_bytes(family, name, load_format, tmp_path):
    small, plain = write_packed_checkpoint(tmp_path / "plain", family, tmp_path / "small", case(name))
    models = [load(each, dtype="bfloat16", load_format=load_format) for each in (small, plain)]
    num_bytes = [sum(map(len, model.storage())) for model in models]
    assert num_bytes[0] < 0.85 * num_bytes[1]
    kept, expected = (logits_in_chunks(model, PROMPT, 13) for model in models)
    if load_format == "auto" and family == "llama":
        torch.testing.assert_close(kept, expected, atol=0.1 * float(expected.abs().max()), rtol=0)
    assert kept.isfinite().all()


def test_rebalance_moves_quantized_experts(tmp_path):
    """Experts of all slots have one layout, so their memory can be exchanged, and added slots have it, too."""
    small, _ = write_packed_checkpoint(tmp_path / "plain", "qwen3_moe", tmp_path / "small", case("gptq"))

    def work(groups: Groups) -> tuple[int, Tensor, Tensor]:
        experts = ExpertOptions(dispatch="all-to-all", balance_interval=2)
        model = load(small, dtype="bfloat16", groups=groups, experts=experts)
        before = logits_in_chunks(model, PROMPT, 40)
        assert model.rebalancer is not None and model.trace is not None
        model.trace.counts[:, :2] += 1000  # the experts of one rank have nearly all tokens
        for _ in range(2):
            model.rebalance_if_due()
        model.on_group_formed()
        return model.rebalancer.num_moved, before, logits_in_chunks(model, PROMPT, 40)

    for num_moved, before, after in run_ranks(work, topology(tp=2)):
        assert num_moved > 0 and torch.equal(before, after)


def test_load_model_leaves_ignored_layers_plain(tmp_path):
    form = case("awq")
    small, plain = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", form)
    tensors, exact = load_file(small / WEIGHTS), load_file(plain / WEIGHTS)
    name = "model.layers.1.mlp.up_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(f"{name}.")}
    save_file(tensors | {f"{name}.weight": exact[f"{name}.weight"]}, small / WEIGHTS, metadata={"format": "pt"})
    edit_config(small, quantization_config=form.config | {"modules_to_not_convert": ["up_proj"]})
    assert torch.equal(logits_in_chunks(load(small), PROMPT, 40), logits_in_chunks(load(plain), PROMPT, 40))


def test_load_model_experts_of_different_formats_are_refused(tmp_path):
    small, plain = write_packed_checkpoint(tmp_path / "plain", "qwen3_moe", tmp_path / "small", case("awq"))
    tensors, exact = load_file(small / WEIGHTS), load_file(plain / WEIGHTS)
    name = next(name for name in exact if "experts.1.down_proj" in name)
    for suffix in ("qweight", "qzeros", "scales"):
        del tensors[f"{name.removesuffix('weight')}{suffix}"]
    save_file(tensors | {name: exact[name]}, small / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="the experts of a layer are stored in different formats"):
        load(small, dtype="bfloat16")


def test_load_model_decodes_a_quantized_head(tmp_path):
    form = case("w4a16")
    small, plain = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", form)
    tensors, exact = load_file(small / WEIGHTS), load_file(plain / WEIGHTS)
    packed, numbers = form.pack(tensors.pop("lm_head.weight"))
    tensors |= {f"lm_head.{suffix}": tensor for suffix, tensor in packed.items()}
    save_file(tensors, small / WEIGHTS, metadata={"format": "pt"})
    save_file(exact | {"lm_head.weight": numbers}, plain / WEIGHTS, metadata={"format": "pt"})
    assert torch.equal(logits_in_chunks(load(small), PROMPT, 40), logits_in_chunks(load(plain), PROMPT, 40))


def test_load_model_logs_that_inputs_are_not_quantized(tmp_path, caplog):
    caplog.set_level("INFO")
    small, _ = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case("w8a8"))
    load(small, dtype="bfloat16")
    assert any("activations stay in bfloat16" in message for message in caplog.messages)
    caplog.clear()
    load(small)
    assert any("are decoded to float32 and take more memory" in message for message in caplog.messages)


def test_load_model_float16_checkpoint_is_computed_in_bfloat16_on_a_cpu(tmp_path):
    small, plain = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case("awq"))
    for checkpoint in (small, plain):
        edit_config(checkpoint, dtype="float16")
    assert load(small).dtype == load(plain, quantization="int8").dtype == torch.bfloat16
    assert load(plain).dtype == load(small, dtype="float16").dtype == torch.float16


def test_load_model_quantization_must_name_the_format_of_the_checkpoint(tmp_path):
    small, plain = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case("awq"))
    expected = logits_in_chunks(load(small), PROMPT, 40)
    assert torch.equal(logits_in_chunks(load(small, quantization="awq"), PROMPT, 40), expected)
    for other in ("gptq", "int4", "fp8"):
        with pytest.raises(ConfigError, match=f"`quantization`: {other} is not the format .* stored as awq"):
            load(small, quantization=other)
    with pytest.raises(ConfigError, match=r"`quantization`: gptq is a format of checkpoints, but .* does not describe"):
        load(plain, quantization="gptq")


def test_update_of_quantized_weights_is_refused(tmp_path):
    small, _ = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case("gptq"))
    model = load(small, dtype="bfloat16")
    expected = logits_in_chunks(model, PROMPT, 40)
    with pytest.raises(WeightsMismatch, match="stored as gptq, and such weights cannot be updated"):
        model.start_update()
    with pytest.raises(WeightsMismatch, match="stored as gptq, and such weights cannot be updated"):
        model.load_weights([("model.norm.weight", torch.ones(64))])
    assert torch.equal(logits_in_chunks(model, PROMPT, 40), expected)


# ---- errors


UP = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("gptq", {"scales": None}, r"tensor '.*up_proj.scales' of shape \[4, 96\] is missing"),
        ("gptq", {"qweight": None}, r"up_proj.weight' of shape \[96, 64\] is missing, and so is '.*up_proj.qweight'"),
        ("gptq", {"qzeros": torch.zeros(4, 11, dtype=torch.int32)}, r"qzeros' has the shape \[4, 11\], .* \[4, 12\]"),
        ("gptq", {"g_idx": torch.full((64,), 4, dtype=torch.int32)}, "g_idx' names groups beyond the 4"),
        ("gptq", {"bias": torch.ones(96)}, "has no place for .*up_proj.bias"),
        ("gptq", {"other": torch.ones(96)}, "has no place for .*up_proj.other"),
        ("gptq-sym", {"qzeros": torch.zeros(4, 12, dtype=torch.int32)}, "zero points other than 8, .* `sym`"),
        ("awq", {"scales": torch.ones(2, 96)}, r"scales' has the shape \[2, 96\], but config.json implies \[4, 96\]"),
        ("awq", {"scales": torch.ones(4, 96, dtype=torch.int32)}, "scales' is stored as I32; supported are F32, F16"),
        ("w4a16", {"weight_shape": torch.tensor([64, 96])}, r"says that the weight is \[64, 96\], .* \[96, 64\]"),
        ("w4a16", {"weight_g_idx": torch.arange(64).int() % 4}, "weight_g_idx' orders the inputs"),
        ("w8a8", {"weight_scale": torch.ones(3, 1)}, r"weight_scale' has the shape \[3, 1\], .* implies \[96, 1\]"),
        ("fp8-tensor", {"weight_scale": torch.ones(95)}, r"weight_scale' has the shape \[95\], .* implies \[96, 1\]"),
        ("fp8-tensor", {"weight_scale": None}, r"weight_scale' of shape \[96, 1\] is missing"),
    ],
)
def test_load_model_wrong_tensors_are_refused(name, changes, problem, tmp_path):
    small, _ = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case(name))
    tensors = load_file(small / WEIGHTS)
    for suffix, tensor in changes.items():
        tensors.pop(f"{UP}.{suffix}", None)
        tensors |= {} if tensor is None else {f"{UP}.{suffix}": tensor}
    save_file(tensors, small / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=problem) as raised:
        load(small)
    assert str(small / WEIGHTS) in str(raised.value)


W4A16 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
W8A8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ("gptq", "`quantization_config` says 'gptq'; .* supported, but for fp8, gptq, awq, compressed-tensors"),
        ({"quant_method": "bitsandbytes"}, "says 'bitsandbytes'; .* supported, but for fp8, gptq, awq"),
        (GPTQ | {"bits": 3}, "in `quantization_config`, `bits` 3 is not supported; supported are 4 and 8"),
        (GPTQ | {"group_size": 0}, "`group_size` must be an integer of at least 1"),
        (GPTQ | {"checkpoint_format": "marlin"}, "`checkpoint_format` 'marlin' is not supported"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "`dynamic` gives modules other formats"),
        (AWQ | {"version": "gemv"}, "`version` 'gemv' is not supported for awq; supported is gemm"),
        (AWQ | {"bits": 8}, "`bits` 8 is not supported for awq"),
        (AWQ | {"zero_point": False}, "`zero_point` false is not supported"),
        (AWQ | {"group_size": 48}, "up_proj.qweight|q_proj.qweight.* 64 inputs, .* `group_size` 48 do not divide"),
        ({"quant_method": "compressed-tensors"}, "`config_groups` is missing"),
        (scheme("nvfp4-pack-quantized", **W4A16), "`format` 'nvfp4-pack-quantized' is not supported; supported are"),
        (scheme("pack-quantized", **W4A16) | {"transform_config": {"a": 1}}, "`transform_config` is not supported"),
        (
            scheme("pack-quantized", **W4A16) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "in `quantization_config.sparsity_config`, `format` 'sparse-24-bitmask' is not supported",
        ),
        (scheme("pack-quantized", **(W4A16 | {"num_bits": 3})), "`num_bits` 3 of `type` 'int' is not supported"),
        (scheme("pack-quantized", INT8_INPUTS, **W4A16), "activations of 8 bits with packed weights"),
        (scheme("int-quantized", **(W8A8 | {"strategy": "rows"})), "`strategy` 'rows' is not supported"),
        (scheme("int-quantized", INT8_INPUTS | {"symmetric": False}, **W8A8), "activations must be symmetric"),
        (scheme("float-quantized", FP8_INPUTS, **W8A8), "`num_bits` 8 of `type` 'int' is not supported in float"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "`activation_scheme` 'none' is not supported"),
    ],
)
def test_load_model_unsupported_format_is_refused(fields, problem, tmp_path):
    plain = make_checkpoint(tmp_path, "llama", tokenizer=False)
    if isinstance(fields, dict) and fields.get("group_size") == 48:
        plain, _ = write_packed_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", case("awq"))
    edit_config(plain, quantization_config=fields)
    with pytest.raises(CheckpointError) as raised:
        load(plain)
    assert re.search(problem, str(raised.value)) and str(plain) in str(raised.value)


def test_load_model_different_schemes_are_refused(tmp_path):
    plain = make_checkpoint(tmp_path, "llama", tokenizer=False)
    fields = scheme("pack-quantized", **W4A16)
    other = scheme("pack-quantized", **(W4A16 | {"group_size": 32}))["config_groups"]["group_0"]
    fields["config_groups"]["group_1"] = other | {"targets": ["re:.*down_proj"]}
    edit_config(plain, quantization_config=fields)
    with pytest.raises(CheckpointError, match=r"`quantization_config.config_groups`, modules have different schemes"):
        load(plain)
