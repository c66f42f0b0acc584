"""Models with adapters have the logits that PEFT computes, alone and in mixed batches, whole and divided."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load
from peft_adapters import ALL, ATTENTION, adapted_logits, make_adapter
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError, ConfigError, NotFound
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.models.base import Model

TOLERANCE = 2e-4

KINDS = {
    "all": {"r": 4, "lora_alpha": 8},
    "few": {"r": 3, "lora_alpha": 2, "target_modules": ["q_proj", "up_proj"], "use_rslora": True},
    "patterns": {
        "r": 2,
        "rank_pattern": {"self_attn.o_proj": 5},
        "alpha_pattern": {"model.layers.1.mlp.down_proj": 20, "k_proj": 1},
    },
    "one layer": {"r": 8, "layers_to_transform": [2]},
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tokenizer=False, attention_bias=True)


@pytest.fixture(scope="module")
def adapters(llama, tmp_path_factory):
    directory = tmp_path_factory.mktemp("adapters")
    return [make_adapter(directory / name, llama, seed=i, **kind) for i, (name, kind) in enumerate(KINDS.items())]


def with_adapters(model: Model, *directories, max_rank: int = 8) -> Model:
    model.enable_adapters(num_slots=8, max_rank=max_rank)
    for slot, directory in enumerate(directories):
        model.adapters.load(slot, directory)
    return model


def mixed_logits(model: Model, slots, prompts) -> dict[str, torch.Tensor]:
    """Compute one sequence for each slot, chunks of several sequences and single tokens in the same batches."""
    run, parts = PagedRun(model), {str(i): [] for i in range(len(slots))}
    for i, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
        run.add(str(i), prompt, adapter=slot)
    left = {str(i): len(prompt) for i, prompt in enumerate(prompts)}
    step = 0
    while left:
        counts = {name: min(count, 7 if (step + int(name)) % 3 == 0 else 1) for name, count in left.items()}
        for name, logits in run.step(counts).items():
            parts[name].append(logits)
        left = {name: count - counts[name] for name, count in left.items() if count > counts[name]}
        step += 1
    return {name: torch.cat(logits) for name, logits in parts.items() if logits}


def prompts_of(count: int, length: int = 20) -> list[list[int]]:
    return [random_prompt(seed, length + seed, 384) for seed in range(count)]


@pytest.fixture(params=[None, "plain torch"])
def kernels(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda *options: TorchBackend())


@pytest.mark.usefixtures("kernels")
def test_logits_of_a_mixed_batch_equal_peft(llama, adapters):
    model = with_adapters(load(llama), *adapters)
    slots = [0, 3, -1, 1, 2, 0, 1]
    prompts = prompts_of(len(slots))
    logits = mixed_logits(model, slots, prompts)
    base = mixed_logits(model, [-1] * len(slots), prompts)
    for i, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
        if slot < 0:
            torch.testing.assert_close(logits[str(i)], base[str(i)], atol=1e-4, rtol=1e-5)
            continue
        expected = adapted_logits(llama, adapters[slot], prompt)
        torch.testing.assert_close(logits[str(i)], expected, atol=TOLERANCE, rtol=TOLERANCE)
        assert (base[str(i)] - expected).abs().max() > 0.1, "the adapter must make a difference"


def test_logits_by_interpreted_kernels_of_gpus_equal_peft(llama, adapters, monkeypatch):
    monkeypatch.setattr("eagleray.models.registry.choose_backend", lambda device, model, *_: CudaBackend(model.dtype))
    run = PagedRun(with_adapters(load(llama), *adapters))
    slots, prompts = [0, -1, 3, 1], [prompt[:5] for prompt in prompts_of(4)]
    for i, (slot, prompt) in enumerate(zip(slots, prompts, strict=True)):
        run.add(str(i), prompt, adapter=slot)
    names = [str(i) for i in range(len(slots))]
    parts = [run.step(dict.fromkeys(names, count)) for count in (4, 1)]
    for i, slot in enumerate(slots):
        if slot >= 0:
            found = torch.cat([part[str(i)] for part in parts])
            expected = adapted_logits(llama, adapters[slot], prompts[i])
            torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("family", "targets", "options"),
    [
        ("qwen3", ALL, {}),
        ("qwen3_moe", ATTENTION, {}),
        ("mistral", ALL, {}),
        ("mistral", ALL, {"head_dim": 12}),  # k and v begin within a vector of the kernels
        ("gpt_oss", ATTENTION, {}),
    ],
)
def test_logits_of_each_family_equal_peft(family, targets, options, tmp_path):
    checkpoint = make_checkpoint(tmp_path / "model", family, tokenizer=False, **options)
    adapter = make_adapter(tmp_path / "adapter", checkpoint, target_modules=targets)
    model = with_adapters(load(checkpoint, dtype="float32"), adapter)
    prompts = prompts_of(2)
    logits = mixed_logits(model, [0, -1], prompts)
    expected = adapted_logits(checkpoint, adapter, prompts[0])
    torch.testing.assert_close(logits["0"], expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (4, 1), (1, 2), (2, 2)])
def test_logits_of_a_divided_model_equal_peft(tp, pp, llama, adapters):
    slots = [0, 3, -1, 1, 2]
    prompts = prompts_of(len(slots))

    def work(groups):
        return mixed_logits(with_adapters(load(llama, groups=groups), *adapters), slots, prompts)

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = run_ranks(work, topology(tp=tp, pp=pp))
    finally:
        torch.set_num_threads(before)
    logits = results[(pp - 1) * tp]
    for i, slot in enumerate(slots):
        if slot >= 0:
            expected = adapted_logits(llama, adapters[slot], prompts[i])
            torch.testing.assert_close(logits[str(i)], expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_slot_that_is_loaded_again_has_the_new_adapter_alone(llama, adapters):
    model = with_adapters(load(llama), *adapters)
    prompts = prompts_of(2)
    mixed_logits(model, [0, 1], prompts)
    model.adapters.load(0, adapters[3])  # it has fewer modules than the one before
    expected = adapted_logits(llama, adapters[3], prompts[0])
    logits = mixed_logits(model, [0, 1], prompts)["0"]
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=TOLERANCE)


def test_adapters_stay_when_the_weights_are_updated_and_passes_are_made_again(llama, adapters, tmp_path):
    model = with_adapters(load(llama), *adapters)
    prompts = prompts_of(2)
    mixed_logits(model, [0, 1], prompts)
    other = make_checkpoint(tmp_path, "llama", tokenizer=False, attention_bias=True, seed=5)
    model.load_weights(load_file(other / "model.safetensors").items())
    model.close()  # as before a sleep
    logits = mixed_logits(model, [0, 1], prompts)
    for slot in (0, 1):
        expected = adapted_logits(other, adapters[slot], prompts[slot])
        torch.testing.assert_close(logits[str(slot)], expected, atol=TOLERANCE, rtol=TOLERANCE)


def edit_config(directory, **fields):
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_tensors(directory, edit):
    path = directory / "adapter_model.safetensors"
    save_file(edit(load_file(path)), path)


def rename(old, new):
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


Q = "base_model.model.model.layers.0.self_attn.q_proj"

MISTAKES = {
    "rank above the limit": (lambda d: None, 3, "rank 4, more than option `max_lora_rank` 3"),
    "dora": (lambda d: edit_config(d, use_dora=True), 8, "`use_dora` is True, which is not supported"),
    "biases": (lambda d: edit_config(d, bias="all"), 8, "`bias` must be none"),
    "whole modules": (lambda d: edit_config(d, modules_to_save=["lm_head"]), 8, "`modules_to_save`"),
    "experts": (lambda d: edit_config(d, target_parameters=["mlp.experts"]), 8, "`target_parameters`"),
    "another base": (lambda d: edit_config(d, init_lora_weights="pissa"), 8, "changes the model's weights"),
    "another method": (lambda d: edit_config(d, peft_type="IA3"), 8, "`peft_type` must be LORA"),
    "an unknown field": (lambda d: edit_config(d, new_method={"x": 1}), 8, "`new_method`"),
    "a pattern": (lambda d: edit_config(d, rank_pattern={".*q_proj": 2}), 8, "no regular expressions"),
    "no alpha": (lambda d: edit_config(d, lora_alpha=-1), 8, "`lora_alpha` must be a positive number"),
    "another rank": (lambda d: edit_config(d, r=5), 8, r"has shape \[4, \d+\], but \[5, \d+\] is expected"),
    "lm_head": (lambda d: edit_tensors(d, rename("model.layers.0.self_attn.q_proj", "lm_head")), 8, "lm_head"),
    "another layer": (lambda d: edit_tensors(d, rename("layers.2", "layers.9")), 8, "the model has no model.layers.9"),
    "magnitudes": (lambda d: edit_tensors(d, rename("lora_A", "lora_magnitude_vector")), 8, "is not a factor"),
    "half an adapter": (
        lambda d: edit_tensors(d, lambda tensors: {n: t for n, t in tensors.items() if n != f"{Q}.lora_B.weight"}),
        8,
        "q_proj.lora_B.weight` is missing",
    ),
    "another shape": (
        lambda d: edit_tensors(d, lambda tensors: tensors | {f"{Q}.lora_B.weight": torch.zeros(32, 4)}),
        8,
        r"q_proj.lora_B.weight` has shape \[32, 4\], but \[64, 4\] is expected",
    ),
    "integers": (
        lambda d: edit_tensors(d, lambda tensors: tensors | {f"{Q}.lora_B.weight": torch.zeros(64, 4).int()}),
        8,
        "is of dtype I32",
    ),
    "no file": (lambda d: (d / "adapter_model.safetensors").unlink(), 8, "has no adapter_model.safetensors"),
    "half a file": (
        lambda d: (d / "adapter_model.safetensors").write_bytes((d / "adapter_model.safetensors").read_bytes()[:5000]),
        8,
        "not a complete safetensors file",
    ),
    "no JSON": (lambda d: (d / "adapter_config.json").write_text("{"), 8, "cannot be read as JSON"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_load_adapter_that_does_not_fit_names_the_problem_and_changes_nothing(mistake, llama, adapters, tmp_path):
    edit, max_rank, message = MISTAKES[mistake]
    directory = tmp_path / "adapter"
    shutil.copytree(adapters[0], directory)
    edit(directory)
    model = load(llama)
    model.enable_adapters(num_slots=2, max_rank=8)
    prompt = prompts_of(1)
    model.adapters.load(0, adapters[0])
    before = mixed_logits(model, [0], prompt)["0"]
    model.adapters._max_rank = max_rank
    with pytest.raises(CheckpointError, match=message):
        model.adapters.load(0, directory)
    assert torch.equal(mixed_logits(model, [0], prompt)["0"], before)


def test_load_adapter_of_a_missing_directory_is_not_found(llama, tmp_path):
    model = with_adapters(load(llama))
    with pytest.raises(NotFound, match="there is no such directory"):
        model.adapters.load(0, tmp_path / "nothing")


def test_digest_of_an_adapter_changes_with_its_files(llama, adapters, tmp_path):
    model = with_adapters(load(llama))
    directory = tmp_path / "adapter"
    shutil.copytree(adapters[0], directory)
    first = model.adapters.load(0, adapters[0])
    assert model.adapters.load(1, directory) == first
    edit_tensors(directory, lambda tensors: {name: tensor * 2 for name, tensor in tensors.items()})
    assert model.adapters.load(1, directory) != first


def test_adapters_of_latent_attention_are_refused(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "deepseek_v2", tokenizer=False)
    with pytest.raises(ConfigError, match="latent attention, for which there are no adapters yet"):
        load(checkpoint).enable_adapters(num_slots=1, max_rank=8)
