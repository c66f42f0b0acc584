"""DeepSeek models have transformers' logits in every variant, for any chunks of the prompt and any batch, divided among
ranks or whole; their cache holds latents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import edit_config, make_checkpoint
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from oracle import Oracle
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError
from eagleray.kernels.forward_batch import ForwardBatch
from eagleray.kernels.kv_cache import KVCache
from eagleray.kernels.torch import mla
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.models import registry
from eagleray.models.moe.layout import ExpertOptions
from eagleray.parallel.groups import Groups

EXACT = 5e-5
"""Tolerance for logits of at most about 8 that are computed in float32 in another order."""
ROUNDING = 1e-4
"""Tolerance for sums over ranks, which are computed in yet another order."""

YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 0.4,
}
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

VARIANTS = {
    "v2": ("deepseek_v2", {}),
    "v2, small queries, scaled": ("deepseek_v2", {"q_lora_rank": 24, "routed_scaling_factor": 1.7}),
    "v2, grouped": ("deepseek_v2", GROUPED | {"first_k_dense_replace": 0}),
    "v2, biases": ("deepseek_v2", {"q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}),
    "v2, yarn": ("deepseek_v2", {"rope_parameters": YARN}),
    "v2, dense": ("deepseek_v2", {"first_k_dense_replace": 3, "tie_word_embeddings": True}),
    "v3": ("deepseek_v3", {}),
    "v3, large queries, one group": ("deepseek_v3", {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "v3, weights as they are": ("deepseek_v3", {"norm_topk_prob": False, "routed_scaling_factor": 1.0}),
    "v3, not interleaved": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "v3, yarn": ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "v3, large values, tied": ("deepseek_v3", {"v_head_dim": 32, "tie_word_embeddings": True}),
}


@pytest.fixture(scope="module", params=VARIANTS)
def checkpoint(request, tmp_path_factory):
    family, overrides = VARIANTS[request.param]
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family, tokenizer=False, **overrides)


@pytest.fixture
def plain(monkeypatch):
    """Run with plain torch."""
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: OneDnnBackend())


@pytest.fixture(params=["chosen", "plain"])
def kernels(request):
    """Run with the backend that is chosen on this machine, and with plain torch."""
    if request.param == "plain":
        request.getfixturevalue("plain")


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread: the work is small, and in some tests several ranks compute at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(seed, length, 384)


def test_forward_prompt_in_chunks_equals_transformers(checkpoint, kernels):
    model, expected = load(checkpoint), Oracle(checkpoint).logits(prompt(90))
    for chunk in (90, 16, 1):
        torch.testing.assert_close(logits_in_chunks(model, prompt(90), chunk), expected, atol=EXACT, rtol=0)


def check_long_prompt(directory) -> None:
    """Check a prompt that is so long that attention computes it in pieces."""
    checkpoint = make_checkpoint(directory, "deepseek_v3", tokenizer=False)
    model, expected = load(checkpoint), Oracle(checkpoint).logits(prompt(620))
    for chunk in (620, 300):
        torch.testing.assert_close(logits_in_chunks(model, prompt(620), chunk), expected, atol=EXACT, rtol=0)


def test_forward_long_prompt_equals_transformers(tmp_path):
    check_long_prompt(tmp_path)


@pytest.mark.parametrize("room", [1 << 30, 1], ids=["all heads at once", "head by head"])
def test_forward_long_prompt_in_plain_torch_equals_transformers(room, tmp_path, monkeypatch, plain):
    monkeypatch.setattr(mla, "EXPANDED_BYTES", room)
    check_long_prompt(tmp_path)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_forward_mixed_batch_equals_rows_alone(family, tmp_path):
    """Decodes of very different lengths, a prompt that starts and one that continues do not affect each other."""
    model = load(make_checkpoint(tmp_path, family, tokenizer=False))
    lengths = {"short": 3, "long": 400, "middle": 120, "first token": 1, "starts": 70, "goes on": 150}
    computed = {"short": 2, "long": 399, "middle": 119, "goes on": 60}
    run = PagedRun(model)
    for seed, (name, length) in enumerate(lengths.items()):
        run.add(name, prompt(length, seed))
    run.step(computed)
    together = run.step({name: length - computed.get(name, 0) for name, length in lengths.items()})
    for seed, (name, length) in enumerate(lengths.items()):
        alone = logits_in_chunks(model, prompt(length, seed), length)[computed.get(name, 0) :]
        torch.testing.assert_close(together[name], alone, atol=EXACT, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides", "tp", "pp"),
    [
        ("deepseek_v2", {"attention_bias": True, "mlp_bias": True}, 2, 1),
        ("deepseek_v2", GROUPED, 1, 2),
        ("deepseek_v3", {"attention_bias": True}, 2, 1),
        ("deepseek_v3", {}, 4, 1),
        ("deepseek_v3", {"q_lora_rank": None}, 1, 3),
        ("deepseek_v3", {}, 2, 2),
    ],
)
def test_forward_divided_among_ranks_equals_whole_model(family, overrides, tp, pp, tmp_path):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    expected = logits_in_chunks(load(checkpoint), prompt(50), 50)

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups)
        return [logits_in_chunks(model, prompt(50), chunk) for chunk in (20, 1)]

    for logits in run_ranks(work, topology(tp=tp, pp=pp))[(pp - 1) * tp]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_forward_on_a_cpu_is_one_native_call(family, tmp_path):
    """Sums over ranks alone cut the program: two in each layer, and that of the embeddings."""
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False)

    def segments(groups: Groups) -> list[bool]:
        model = load(checkpoint, groups=groups)
        logits_in_chunks(model, prompt(5), 5)
        return [segment.host is None for segment in model._run._program._segments]

    assert segments(Groups.single()) == [True]
    assert run_ranks(segments, topology(tp=2)) == [[True, False] * 7 + [True]] * 2


@pytest.mark.parametrize("dispatch", ["all-reduce", "all-gather", "all-to-all"])
def test_forward_experts_divided_among_ranks_equals_whole_model(dispatch, tmp_path):
    """Some steps have so few tokens that a rank has none."""
    checkpoint = make_checkpoint(tmp_path, "deepseek_v2", tokenizer=False, mlp_bias=True)
    expected = logits_in_chunks(load(checkpoint), prompt(25), 25)

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups, experts=ExpertOptions(dispatch=dispatch))
        return [logits_in_chunks(model, prompt(25), chunk) for chunk in (25, 3, 1)]

    for logits in run_ranks(work, topology(tp=2))[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize(("family", "overrides"), [("deepseek_v2", {}), ("deepseek_v2", GROUPED), ("deepseek_v3", {})])
def test_trace_experts_equal_transformers(family, overrides, tmp_path, kernels):
    checkpoint = make_checkpoint(tmp_path, family, tokenizer=False, **overrides)
    model, oracle, chosen = load(checkpoint, experts=ExpertOptions(keeps_ids=True)), Oracle(checkpoint), []
    for layer in oracle.model.model.layers[1:]:
        layer.mlp.gate.register_forward_hook(lambda module, given, out: chosen.append(out[2]))
    oracle.logits(prompt(60))
    expected = torch.stack(chosen, dim=1)  # [tokens, layers, experts of a token]
    logits_in_chunks(model, prompt(60), 60)
    found = model.trace.ids(range(60), 60).long()
    assert found.shape == (60, 2, 3)
    assert torch.equal(found.sort(dim=-1).values, expected.sort(dim=-1).values)
    assert torch.equal(model.trace.counts.sum(dim=1), torch.tensor([180, 180]))


def test_cache_shape_holds_whole_latents_on_every_rank(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)

    def bytes_per_block(groups: Groups) -> int:
        model = load(checkpoint, groups=groups, dtype="bfloat16")
        return KVCache.bytes_per_block(model.cache_shape(16), model.dtype)

    assert bytes_per_block(Groups.single()) == 3 * 16 * (32 + 8) * 2
    assert run_ranks(bytes_per_block, topology(tp=2)) == [3 * 16 * (32 + 8) * 2] * 2


def test_load_model_draft_layers_are_left_out(tmp_path):
    """The checkpoints of DeepSeek-V3 have a draft layer behind the last layer."""
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)
    expected = logits_in_chunks(load(checkpoint), prompt(10), 10)
    file = checkpoint / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"model.layers.3.eh_proj.weight": torch.zeros(64, 128)}, file, {"format": "pt"})
    assert torch.equal(logits_in_chunks(load(checkpoint), prompt(10), 10), expected)
    edit_config(checkpoint, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"has no place for model\.layers\.3\.eh_proj\.weight"):
        load(checkpoint)


def test_forward_batch_of_no_tokens_returns_nothing(tmp_path):
    run = PagedRun(load(make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)))
    none = np.zeros(0, np.int32)
    nothing = ForwardBatch(none, none, none, np.zeros((0, 0), np.int32), none, np.zeros(1, np.int32), 0)
    assert run.model.forward(nothing, run.cache).shape == (0, 64)
    run.add("only", prompt(20))
    run.step({"only": 5})
    run.model.forward(nothing, run.cache)
    expected = logits_in_chunks(run.model, prompt(20), 20)
    torch.testing.assert_close(run.run("only", 15), expected[5:], atol=EXACT, rtol=0)
