"""Batch invariance: a request's numbers are the same bits whatever the other requests of a step, the division of its
tokens into steps, and the number of threads."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks

from eagleray.errors import ConfigError
from eagleray.parallel.groups import Groups

FAMILIES = ["qwen3", "mistral", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v2", "deepseek_v3"]
DTYPES = ["bfloat16", "float32"]


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), request.param, tokenizer=False)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_prompt_in_chunks_has_the_same_bits(checkpoint, dtype):
    model, prompt = load(checkpoint, dtype=dtype), random_prompt(0, 150, 384)
    whole = logits_in_chunks(model, prompt, 150)
    for chunk in (64, 17, 1):
        assert torch.equal(logits_in_chunks(model, prompt, chunk), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_row_in_a_batch_has_the_same_bits(checkpoint, dtype):
    model = load(checkpoint, dtype=dtype)
    lengths = {"long": 200, "middle": 61, "short": 3, "starts": 70, "goes on": 150}
    computed = {"long": 199, "middle": 60, "short": 2, "goes on": 60}
    run = PagedRun(model)
    for seed, (name, length) in enumerate(lengths.items()):
        run.add(name, random_prompt(seed, length, 384))
    run.step(computed)
    together = run.step({name: length - computed.get(name, 0) for name, length in lengths.items()})
    for seed, (name, length) in enumerate(lengths.items()):
        alone = logits_in_chunks(model, random_prompt(seed, length, 384), length)
        assert torch.equal(together[name], alone[computed.get(name, 0) :])


@pytest.mark.parametrize("dtype", DTYPES)
def test_forward_on_several_threads_has_the_same_bits(checkpoint, dtype, threads, monkeypatch):
    monkeypatch.setattr("eagleray.kernels.cpu.linear.SINGLE_THREAD_SECONDS", 0.0)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(logits_in_chunks(load(checkpoint, dtype=dtype), random_prompt(0, 90, 384), 40))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_load_model_deterministic_on_cpu_is_accepted(checkpoint, dtype):
    assert load(checkpoint, dtype=dtype, invariant_for="deterministic").dtype == getattr(torch, dtype)


def test_load_model_deterministic_float16_is_refused(checkpoint):
    with pytest.raises(ConfigError, match="`deterministic`: the kernels for float16 on cpu are not batch-invariant"):
        load(checkpoint, dtype="float16", invariant_for="deterministic")


def test_load_model_deterministic_with_unordered_sums_is_refused(checkpoint, monkeypatch):
    groups = Groups.single()
    monkeypatch.setattr(type(groups.tp), "is_ordered", False)
    with pytest.raises(ConfigError, match="`deterministic`: sums over 1 tensor-parallel ranks of several hosts"):
        load(checkpoint, invariant_for="deterministic", groups=groups)
