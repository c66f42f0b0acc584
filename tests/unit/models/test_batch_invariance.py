"""A request's numbers do not depend on its company, bit for bit: neither on the other requests of a step, nor on how
its tokens were divided into steps, nor on the number of threads."""

from __future__ import annotations

import pytest
import torch
from checkpoints import make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks

from eagleray.errors import ConfigError
from eagleray.parallel.groups import Groups

FAMILIES = ["qwen3", "mistral", "qwen3_moe", "mixtral", "gpt_oss"]
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
def test_a_prompt_whole_in_chunks_and_token_by_token(checkpoint, dtype):
    model, prompt = load(checkpoint, dtype=dtype), random_prompt(0, 150, 384)
    whole = logits_in_chunks(model, prompt, 150)
    for chunk in (64, 17, 1):
        assert torch.equal(logits_in_chunks(model, prompt, chunk), whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_alone_and_in_a_batch(checkpoint, dtype):
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
def test_by_one_thread_and_by_several(checkpoint, dtype, threads, monkeypatch):
    monkeypatch.setattr("eagleray.kernels.cpu.program.SINGLE_THREAD_SECONDS", 0.0)
    found = []
    for count in (1, 2, 3):
        threads(count)
        found.append(logits_in_chunks(load(checkpoint, dtype=dtype), random_prompt(0, 90, 384), 40))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_promise_that_is_kept(checkpoint, dtype):
    assert load(checkpoint, dtype=dtype, deterministic=True).dtype == getattr(torch, dtype)


def test_a_promise_that_could_not_be_kept_is_not_made(checkpoint):
    with pytest.raises(ConfigError, match="`deterministic`: what computes float16 on cpu here cannot promise it"):
        load(checkpoint, dtype="float16", deterministic=True)


def test_nor_is_it_for_sums_in_varying_order(checkpoint, monkeypatch):
    groups = Groups.single()
    monkeypatch.setattr(type(groups.tp), "is_ordered", False)
    with pytest.raises(ConfigError, match="`deterministic`: sums over 1 tensor-parallel ranks of several hosts"):
        load(checkpoint, deterministic=True, groups=groups)
