"""Weights that are pushed into a model equal, bit by bit, those of a model that was loaded with them."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import CLASSES, FAMILIES, edit_config, make_checkpoint
from harness import random_prompt
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from keeping_backend import KeepingBackend
from model_runs import PagedRun, load, logits_in_chunks
from quantized_checkpoints import pack_mxfp4, write_fp8_checkpoint
from safetensors.torch import save_file
from torch import Tensor
from weight_pushes import copy_of_weights, have_equal_bytes, load_rank, memory_of_weights, tensors_of

from eagleray.errors import EagleRayError, WeightsMismatch, WrongState
from eagleray.kernels.cpu.huge_pages import WeightChunk, whole_lines
from eagleray.kernels.cuda.backend import CudaBackend
from eagleray.kernels.quantized import Fp8Weight
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.models import mxfp4, registry
from eagleray.models.base import Model
from eagleray.models.moe.layout import ExpertOptions
from eagleray.parallel.mesh import Mesh

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
K_PROJ = "model.layers.0.self_attn.k_proj.weight"
V_PROJ = "model.layers.0.self_attn.v_proj.weight"
PROMPT = random_prompt(0, 20, 384)

BACKENDS = {
    "native": None,
    "torch": lambda dtype: TorchBackend(),
    "onednn": lambda dtype: OneDnnBackend(),
    "keeping": KeepingBackend,
    "cuda": CudaBackend,
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Return a function that makes two checkpoints of a family, with different weights."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}

    def make(family: str, dtype: str = "bfloat16") -> tuple[Path, Path]:
        if (family, dtype) not in made:
            first, second = (
                make_checkpoint(tmp_path_factory.mktemp(family), family, tokenizer=False, dtype=dtype, seed=seed)
                for seed in (1, 2)
            )
            made[family, dtype] = first, second
        return made[family, dtype]

    return make


def use_backend(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if (make := BACKENDS[name]) is not None:
        monkeypatch.setattr(registry, "choose_backend", lambda device, model, *_: make(model.dtype))


class Ranks:
    """The ranks of a model, the weights that each has when it is loaded from either of two checkpoints, and the tensors
    of both."""

    def __init__(self, checkpoints: tuple[Path, Path], meshes: list[Mesh], **options: object) -> None:
        loaded = [[load_rank(checkpoint, mesh, **options) for mesh in meshes] for checkpoint in checkpoints]
        self.weights = [[copy_of_weights(model) for model in ranks] for ranks in loaded]
        self.tensors = [tensors_of(checkpoint) for checkpoint in checkpoints]
        self.models = loaded[0]
        self.addresses = [[part.data_ptr() for part in memory_of_weights(model)] for model in self.models]


def draw_pushes(data: st.DataObject, tensors: list[list[tuple[str, Tensor]]], target: int) -> list:
    """Draw calls that push some tensors of both checkpoints and then all of `target`, in any order and split."""
    count = len(tensors[0])
    some = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, count - 1)), max_size=12))
    order = [*some, *((target, index) for index in data.draw(st.permutations(range(count))))]
    pushes = [tensors[which][index] for which, index in order]
    ends = sorted(data.draw(st.sets(st.integers(1, len(pushes)), max_size=6)) | {len(pushes)})
    return [pushes[first:last] for first, last in zip([0, *ends], ends, strict=False)]


CASES = {
    "llama, one rank": ("llama", [Mesh()], "native", {}),
    "llama, tp": ("llama", [Mesh(rank=rank, tp_size=2) for rank in range(2)], "native", {}),
    "qwen3 tied, pp": ("qwen3", [Mesh(rank=rank, pp_size=2) for rank in range(2)], "native", {}),
    "deepseek_v3, tp, torch": ("deepseek_v3", [Mesh(rank=rank, tp_size=2) for rank in range(2)], "torch", {}),
    "deepseek_v2, one rank": ("deepseek_v2", [Mesh()], "native", {}),
    "gpt_oss, tp": ("gpt_oss", [Mesh(rank=1, tp_size=2)], "native", {}),
    "mixtral, onednn": ("mixtral", [Mesh()], "onednn", {}),
    "qwen3_moe, cuda": ("qwen3_moe", [Mesh()], "cuda", {}),
    "deepseek_v3, cuda": ("deepseek_v3", [Mesh()], "cuda", {}),
    "qwen3_moe, ep": (
        "qwen3_moe",
        [Mesh(rank=rank, tp_size=2) for rank in range(2)],
        "native",
        {"experts": ExpertOptions(dispatch="all-gather", num_redundant=4)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_load_weights_any_sequence_equals_fresh_load(case, checkpoints, monkeypatch):
    """At once, and in an update that replaces whole chunks of memory."""
    family, meshes, backend, options = CASES[case]
    use_backend(monkeypatch, backend)
    ranks = Ranks(checkpoints(family), meshes, **options)

    @settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), target=st.integers(0, 1), is_staged=st.booleans())
    def check(data: st.DataObject, target: int, is_staged: bool) -> None:
        calls = draw_pushes(data, ranks.tensors, target)
        for model, addresses, expected in zip(ranks.models, ranks.addresses, ranks.weights[target], strict=True):
            update = model.start_update() if is_staged else None
            for call in calls:
                assert model.load_weights(call) == {name for name, _ in call}
            if update is not None:
                update.apply()
                update.drop()
            assert have_equal_bytes(memory_of_weights(model), expected)
            assert [part.data_ptr() for part in memory_of_weights(model)] == addresses

    check()


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_load_weights_moved_experts_get_their_weights_in_every_slot(checkpoints, data):
    old, new = checkpoints("qwen3_moe")
    mesh = Mesh(rank=data.draw(st.integers(0, 1)), tp_size=2)
    model = load_rank(old, mesh, experts=ExpertOptions(dispatch="all-to-all", num_redundant=2))
    whole = load(new)
    for block in model.moe_blocks:
        assert block.slots is not None
        extra = data.draw(st.lists(st.integers(0, 7), min_size=2, max_size=2))
        block.slots.assign(torch.tensor(data.draw(st.permutations([*range(8), *extra]))).numpy())
    model.load_weights(data.draw(st.permutations(tensors_of(new))))
    for block, single in zip(model.moe_blocks, whole.moe_blocks, strict=True):
        for slot, expert in enumerate(block.local_experts):
            assert have_equal_bytes(block.products.storage(slot), single.products.storage(expert))


@pytest.mark.parametrize("family", FAMILIES)
def test_load_weights_running_model_computes_with_the_new_ones(family, checkpoints):
    """The recorded pass of a model that has computed before reads the new weights, also the names of transformers."""
    old, new = checkpoints(family)
    expected = logits_in_chunks(load(new), PROMPT, 20)
    model = load(old)
    run = PagedRun(model)
    names = ("before", "after", "again")
    for name in names:
        run.add(name, PROMPT)
    before = run.run("before", 20)
    theirs = CLASSES[family][1].from_pretrained(new, dtype=torch.bfloat16)
    biases = [(name, bias) for name, bias in theirs.named_buffers() if name.endswith("correction_bias")]
    model.load_weights([*theirs.named_parameters(), *biases])
    assert not torch.equal(before, expected) and torch.equal(run.run("after", 20), expected)
    model.load_weights(tensors_of(new))
    assert torch.equal(run.run("again", 20), expected)


# ---- staged updates


@pytest.fixture
def llama(checkpoints) -> tuple[Model, list[tuple[str, Tensor]]]:
    """A model and the tensors of another checkpoint."""
    old, new = checkpoints("llama")
    return load(old), tensors_of(new)


def test_start_update_staged_weights_wait_for_apply(llama, checkpoints):
    model, tensors = llama
    before = copy_of_weights(model)
    update = model.start_update()
    update.add(tensors[:-1])
    update.add(tensors[-1:])
    assert have_equal_bytes(memory_of_weights(model), before)
    assert update.is_waiting
    assert update.missing() == update.untouched() == []
    update.apply()
    assert not update.is_waiting
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(checkpoints("llama")[1])))


def test_start_update_in_place_replaces_complete_groups_at_once(llama, checkpoints):
    model, tensors = llama
    update = model.start_update(in_place=True)
    update.add(tensors)
    assert not update.is_waiting
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(checkpoints("llama")[1])))


def test_updates_prepare_makes_the_memory_that_an_update_uses(checkpoints):
    model = load(checkpoints("llama")[0])
    chunks = model.updates.prepare()
    assert sum(chunk().used for chunk in chunks) == sum(
        whole_lines(len(part)) for part in memory_of_weights(model) if WeightChunk.of(part) is not None
    )
    update = model.start_update()
    update.add(tensors_of(checkpoints("llama")[1]))
    staged = {WeightChunk.of(part) for group in update._groups for part in group.staged}
    assert {chunk() for chunk in chunks} <= staged
    update.drop()
    del update, staged
    model.updates.release()
    assert [chunk() for chunk in chunks] == [None] * len(chunks)


def test_add_tensors_one_by_one_twice_keeps_the_memory_of_new_weights_alone(llama):
    model, tensors = llama
    update = model.start_update()
    for pushed in [*tensors, *tensors]:
        update.add([pushed])
    staged = {part.data_ptr() for group in update._groups for part in group.staged}
    assert update._memory._taken.keys() == staged


def test_run_update_dropped_meanwhile_raises_and_leaves_the_rest(llama):
    update, done = llama[0].start_update(), []

    def drop_at_third(item):
        done.append(item)
        update.is_open = len(done) < 3

    with pytest.raises(WrongState, match="was dropped"):
        update._run(drop_at_third, range(100))
    assert 3 <= len(done) < 100


def test_add_in_inference_mode_equals_fresh_load(llama, checkpoints):
    model, tensors = llama
    with torch.inference_mode():
        update = model.start_update()
        for name, tensor in tensors:
            update.add([(name, tensor * 1)])
        update.apply()
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(checkpoints("llama")[1])))


def test_check_reads_no_elements(llama):
    model, tensors = llama
    update = model.start_update()
    update.check((name, tensor.to("meta")) for name, tensor in tensors)
    assert update.untouched() == sorted(name for name, _ in tensors)
    with pytest.raises(WeightsMismatch, match=r"the shape \[64\]"):
        update.check([(Q_PROJ, torch.empty(64, device="meta"))])


@pytest.mark.parametrize("backend", ["native", "torch"])
def test_load_weights_below_adapters_equals_fresh_load(backend, checkpoints, monkeypatch):
    use_backend(monkeypatch, backend)
    old, new = checkpoints("llama")
    model = load(old)
    model.enable_adapters(num_slots=2, max_rank=4)
    model.load_weights(tensors_of(new))
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(new)))


def test_add_after_drop_is_refused(llama):
    model, tensors = llama
    update = model.start_update()
    update.drop()
    with pytest.raises(WrongState, match="the weight update was dropped"):
        update.add(tensors)


def test_drop_staged_weights_leaves_the_old_ones(llama):
    model, tensors = llama
    before = copy_of_weights(model)
    update = model.start_update()
    update.add(tensors)
    update.drop()
    assert have_equal_bytes(memory_of_weights(model), before)
    assert model.start_update().missing() == []


def test_missing_names_the_rest_of_groups_that_were_begun(llama):
    model, tensors = llama
    pushed = dict(tensors)
    update = model.start_update()
    assert update.add([(Q_PROJ, pushed[Q_PROJ])]) == {Q_PROJ}
    assert update.missing() == [K_PROJ, V_PROJ]
    assert update.untouched() == sorted(pushed.keys() - {Q_PROJ, K_PROJ, V_PROJ})
    update.add([(V_PROJ, pushed[V_PROJ])])
    assert update.missing() == [K_PROJ]


def test_add_tensor_may_change_after_the_call(llama, checkpoints):
    model, tensors = llama
    for name, tensor in tensors:
        model.load_weights([(name, buffer := tensor.clone())])
        buffer.fill_(7)
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(checkpoints("llama")[1])))


def test_second_update_takes_the_memory_of_the_first(llama, monkeypatch):
    model, tensors = llama
    model.load_weights(tensors)
    expected = copy_of_weights(model)
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors)
    monkeypatch.setattr(model.updates._staging, "_make", lambda num_bytes: pytest.fail("fresh memory"))
    model.load_weights(reversed(tensors))
    assert have_equal_bytes(memory_of_weights(model), expected)


def strided(tensor: Tensor) -> Tensor:
    """Return the tensor with gaps between its numbers."""
    return torch.stack((tensor, tensor), dim=-1)[..., 0]


def test_close_frees_the_memory_of_finished_updates(llama, checkpoints):
    model, tensors = llama
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors)
    staging = weakref.ref(model.updates._staging)
    model.close()
    assert staging() is None
    update = model.start_update()
    update.add(tensors)
    model.close()
    update.apply()
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(checkpoints("llama")[1])))


def test_lost_experts_are_not_read_again_after_an_update(checkpoints):
    old, new = checkpoints("qwen3_moe")
    model = load_rank(old, Mesh(rank=0, tp_size=2), experts=ExpertOptions(dispatch="all-to-all"))
    assert model.rebalancer is not None
    lost = [(model.moe_blocks[0], 0, 5)]
    model.rebalancer._restore(lost)
    model.load_weights(tensors_of(new))
    model.close()
    with pytest.raises(EagleRayError, match="the checkpoint has older weights than this instance"):
        model.rebalancer._restore(lost)


def test_rebalance_if_due_waits_for_the_end_of_an_update(llama):
    model, tensors = llama
    steps: list[bool] = []
    model.rebalancer = SimpleNamespace(step=lambda may_move: steps.append(may_move))
    update = model.start_update()
    model.rebalance_if_due()
    update.drop()
    model.load_weights([(name, tensor) for name, tensor in tensors if name == Q_PROJ])
    model.rebalance_if_due()
    model.load_weights(tensors)
    model.rebalance_if_due()
    assert steps == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_load_weights_of_another_dtype_and_stride_are_cast(dtype, llama):
    model, tensors = llama
    model.load_weights(tensors)
    expected = copy_of_weights(model)
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors)
    model.load_weights((name, strided(tensor.to(dtype)).requires_grad_()) for name, tensor in tensors)
    assert have_equal_bytes(memory_of_weights(model), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_named_parameters_are_those_of_the_checkpoint(family, checkpoints):
    old, _ = checkpoints(family)
    expected = {name: tuple(tensor.shape) for name, tensor in tensors_of(old)}
    assert {name: shape for name, shape, _ in load(old).named_parameters()} == expected
    found: dict[str, tuple[int, ...]] = {}
    for rank in range(4):
        model = load_rank(old, Mesh(rank=rank, tp_size=2, pp_size=2))
        found |= {name: shape for name, shape, _ in model.named_parameters()}
    assert found == expected


# ---- tensors that do not fit


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        (
            "model.layers.0.self_attn.q_prj.weight",
            torch.zeros(64, 64),
            f"no tensor .*q_prj.*nearest.* are {Q_PROJ}",
        ),
        ("model.layers.3.self_attn.q_proj.weight", torch.zeros(64, 64), "the model has no tensor 'model.layers.3"),
        (Q_PROJ, torch.zeros(64, 32), rf"'{Q_PROJ}' has the shape \[64, 32\], but the model's has \[64, 64\]"),
        (Q_PROJ, torch.zeros(64, 64, dtype=torch.int8), f"'{Q_PROJ}' is of int8; supported are bfloat16, float16"),
        (Q_PROJ, torch.zeros(64, 64).to(torch.float8_e4m3fn), f"'{Q_PROJ}' is of float8_e4m3fn"),
        (f"{Q_PROJ}_scale_inv", torch.zeros(1, 1), "no tensor .*_scale_inv'"),
    ],
)
def test_load_weights_tensor_that_does_not_fit_is_refused(name, tensor, problem, llama):
    model, tensors = llama
    before = copy_of_weights(model)
    with pytest.raises(WeightsMismatch, match=problem):
        model.load_weights([*tensors, (name, tensor)])
    assert have_equal_bytes(memory_of_weights(model), before)
    model.load_weights(tensors)
    assert not have_equal_bytes(memory_of_weights(model), before)


def test_load_weights_wrong_fused_experts_are_refused(checkpoints):
    model = load(checkpoints("qwen3_moe")[0])
    with pytest.raises(WeightsMismatch, match=r"experts.gate_up_proj' has the shape \[8, 96, 32\].*\[8, 96, 64\]"):
        model.load_weights([("model.layers.1.mlp.experts.gate_up_proj", torch.zeros(8, 96, 32))])


def test_load_weights_of_other_stages_and_computed_tables_are_passed_over(checkpoints):
    old, new = checkpoints("llama")
    model = load_rank(old, Mesh(rank=0, pp_size=2))
    tables = [("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(8))]
    assert model.load_weights([*tensors_of(new), *tables]) == {name for name, _ in tensors_of(new)}
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load_rank(new, Mesh(rank=0, pp_size=2))))


def test_load_weights_tied_head_is_dropped_unless_it_differs(checkpoints):
    old, new = checkpoints("qwen3")
    model, tensors = load(old), dict(tensors_of(new))
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in model.load_weights((tensors | {"lm_head.weight": embedding}).items())
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(new)))
    with pytest.raises(WeightsMismatch, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        model.load_weights((tensors | {"lm_head.weight": embedding + 1}).items())


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("backend", ["native", "torch", "onednn", "cuda"])
@pytest.mark.parametrize("mesh", [Mesh(), Mesh(rank=1, tp_size=2), Mesh(rank=1, pp_size=2)], ids=["one", "tp", "pp"])
def test_add_tied_head_in_another_call_is_dropped_unless_it_differs(mesh, backend, checkpoints, monkeypatch):
    use_backend(monkeypatch, backend)
    old, new = checkpoints("qwen3")
    model, pushed = load_rank(old, mesh), dict(tensors_of(new))[EMBEDDING]
    present = dict(tensors_of(old))[EMBEDDING]
    before = copy_of_weights(model)
    for calls, is_equal in [
        ([(HEAD, present)], True),
        ([(HEAD, present.float())], True),
        ([(HEAD, pushed)], False),
        ([(EMBEDDING, pushed), (HEAD, pushed)], True),
        ([(HEAD, pushed), (EMBEDDING, pushed)], True),
        ([(EMBEDDING, pushed), (HEAD, present)], False),
        ([(HEAD, present), (EMBEDDING, pushed)], False),
        ([(HEAD, present), (EMBEDDING, pushed), (HEAD, pushed)], True),
        ([(EMBEDDING, pushed), (HEAD, pushed), (EMBEDDING, present)], False),
    ]:
        update = model.start_update()
        for name, tensor in calls:
            update.add([(name, buffer := tensor.clone())])
            buffer.fill_(7)
        if is_equal:
            assert update.missing() == []
        else:
            with pytest.raises(WeightsMismatch, match=f"'{HEAD}' differs from '{EMBEDDING}'.*push the same numbers"):
                update.missing()
        update.drop()
    assert have_equal_bytes(memory_of_weights(model), before)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("batch", [[EMBEDDING], [EMBEDDING, HEAD], [HEAD]])
def test_missing_tied_pair_whose_tensors_come_again_is_refused_unless_they_are_equal(batch, in_place, checkpoints):
    old, new = checkpoints("qwen3")
    model, first = load(old), dict(tensors_of(old))[EMBEDDING]
    second = dict(tensors_of(new))[EMBEDDING]
    update = model.start_update(in_place=in_place)
    update.add([(EMBEDDING, first), (HEAD, first)])
    assert update.missing() == []
    update.add([(name, second) for name in batch])
    if len(batch) == 2:
        assert update.missing() == []
    else:
        with pytest.raises(WeightsMismatch, match=f"'{HEAD}' differs from '{EMBEDDING}'"):
            update.missing()
        update.add([(name, first) for name in batch])
    assert update.missing() == []
    update.apply()
    assert update.missing() == []
    update.drop()


@pytest.mark.parametrize(
    ("head", "problem"),
    [
        (torch.zeros(64, 64), rf"'{HEAD}' has the shape \[64, 64\]"),
        (torch.zeros(384, 64).to(torch.float8_e4m3fn), f"'{HEAD}' is of float8_e4m3fn"),
    ],
)
def test_check_tied_head_that_does_not_fit_is_refused(head, problem, checkpoints):
    update = load(checkpoints("qwen3")[0]).start_update()
    with pytest.raises(WeightsMismatch, match=problem):
        update.check([(HEAD, head.to("meta"))])


def test_load_weights_tied_head_in_a_later_call_is_refused_once_if_it_differs(checkpoints):
    old, new = checkpoints("qwen3")
    model, tensors = load(old), dict(tensors_of(new))
    model.load_weights(tensors.items())
    model.load_weights([(HEAD, tensors[EMBEDDING])])
    with pytest.raises(WeightsMismatch, match=f"'{HEAD}' differs from '{EMBEDDING}'"):
        model.load_weights([(HEAD, tensors[EMBEDDING] + 1)])
    model.load_weights([(Q_PROJ, tensors[Q_PROJ])])
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(new)))


# ---- quantized weights


@pytest.fixture(params=["native", "keeping", "cuda"])
def backend(request, monkeypatch):
    """Name of a backend that computes with quantized weights (in bfloat16), or keeps them and decodes them later."""
    use_backend(monkeypatch, request.param)
    return request.param


FP8_FIELDS = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_load_weights_fp8_with_scales_equals_fresh_load(family, backend, tmp_path):
    fields = FP8_FIELDS if family == "llama" else {}
    small, plain = write_fp8_checkpoint(tmp_path / "plain", family, tmp_path / "small", (24, 128), **fields)
    model = load(small, dtype="bfloat16")
    expected = copy_of_weights(model)
    tensors = tensors_of(small)
    zeros = [(name, torch.zeros_like(tensor)) for name, tensor in tensors_of(plain)]
    model.load_weights(zeros)
    assert not have_equal_bytes(memory_of_weights(model), expected)
    for name, tensor in tensors:
        model.load_weights([(name, tensor)])
    assert have_equal_bytes(memory_of_weights(model), expected)


def test_load_weights_plain_numbers_are_quantized_where_fp8_is_kept(backend, tmp_path):
    small, plain = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", (24, 128), **FP8_FIELDS)
    model = load(small, dtype="float32")
    expected = logits_in_chunks(model, PROMPT, 20) if backend != "cuda" else None
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors_of(plain))
    model.load_weights(tensors_of(plain))
    if expected is not None:
        torch.testing.assert_close(logits_in_chunks(model, PROMPT, 20), expected, atol=1e-3, rtol=0)
        return
    numbers = dict(tensors_of(plain))  # compared directly, because interpreted passes take seconds
    groups = {param.name: group for group in model.weight_groups() for param in group.params}
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        weight = groups[name].operation.weight.weight
        assert isinstance(weight, Fp8Weight)
        torch.testing.assert_close(weight.dequantize(torch.float32), numbers[name], rtol=2**-4, atol=1e-3)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_load_weights_model_quantized_at_load_quantizes_pushes(load_format, tmp_path, monkeypatch):
    use_backend(monkeypatch, "cuda")
    checkpoint = make_checkpoint(tmp_path, "llama", tokenizer=False)
    expected = copy_of_weights(load(checkpoint, quantization="fp8"))
    model = load(checkpoint, quantization="fp8", load_format=load_format)
    model.load_weights((name, torch.ones_like(tensor)) for name, tensor in tensors_of(checkpoint))
    assert not have_equal_bytes(memory_of_weights(model), expected)
    model.load_weights(tensors_of(checkpoint))
    assert have_equal_bytes(memory_of_weights(model), expected)


def test_load_weights_fp8_onto_dummy_weights_equals_fresh_load(tmp_path, monkeypatch):
    use_backend(monkeypatch, "cuda")
    fields = {**FP8_FIELDS, "intermediate_size": 256}  # of whole blocks, as in dummy weights
    small, _ = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", (128, 128), **fields)
    model = load(small, load_format="dummy")
    model.load_weights(tensors_of(small))
    assert have_equal_bytes(memory_of_weights(model), memory_of_weights(load(small)))


def test_load_weights_fp8_onto_plain_weight_is_decoded(tmp_path, monkeypatch):
    """A checkpoint in FP8 may have plain weights, too."""
    use_backend(monkeypatch, "cuda")
    small, plain = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", (128, 128), **FP8_FIELDS)
    name = "model.layers.0.self_attn.o_proj.weight"
    tensors, decoded = dict(tensors_of(small)), dict(tensors_of(plain))[name]
    scales = tensors.pop(f"{name}_scale_inv")
    save_file(tensors | {name: decoded}, small / "model.safetensors", metadata={"format": "pt"})
    model = load(small)
    expected = copy_of_weights(model)
    model.load_weights([(name, torch.zeros_like(decoded))])
    model.load_weights([(name, tensors[name]), (f"{name}_scale_inv", scales)])
    assert have_equal_bytes(memory_of_weights(model), expected)


def test_missing_fp8_weight_waits_for_its_scales(tmp_path):
    small, _ = write_fp8_checkpoint(tmp_path / "plain", "llama", tmp_path / "small", (24, 40))
    update, tensors = load(small).start_update(), dict(tensors_of(small))
    name = "model.layers.0.self_attn.o_proj.weight"
    update.add([(name, tensors[name])])
    assert update.missing() == [f"{name}_scale_inv"]
    with pytest.raises(WeightsMismatch, match=r"_scale_inv' has the shape \[1, 1\], but the model's has \[3, 2\]"):
        update.add([(f"{name}_scale_inv", torch.zeros(1, 1))])


def test_load_weights_mxfp4_and_plain_numbers_equal_fresh_load(backend, tmp_path):
    packed = make_checkpoint(tmp_path / "packed", "gpt_oss", tokenizer=False)
    pack_mxfp4(packed)
    model, tensors = load(packed), tensors_of(packed)
    expected = copy_of_weights(model)
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors)
    assert not have_equal_bytes(memory_of_weights(model), expected)
    model.load_weights(tensors)
    assert have_equal_bytes(memory_of_weights(model), expected)
    plain = dict(tensors)
    for name in [name.removesuffix("_blocks") for name in plain if name.endswith("_blocks")]:
        blocks, scales = plain.pop(f"{name}_blocks"), plain.pop(f"{name}_scales")
        decoded = [mxfp4.decode(*one, torch.float32).T for one in zip(blocks, scales, strict=True)]
        plain[name] = torch.stack(decoded)
    model.load_weights((name, torch.zeros_like(tensor)) for name, tensor in tensors)
    model.load_weights(plain.items())
    assert have_equal_bytes(memory_of_weights(model), expected)


def test_encode_decoded_numbers_are_the_same(tmp_path):
    blocks = torch.randint(256, (16, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 150, (16, 5), dtype=torch.uint8)
    numbers = mxfp4.decode(blocks, scales, torch.float32)
    assert torch.equal(mxfp4.decode(*mxfp4.encode(numbers), torch.float32), numbers)
    assert not mxfp4.decode(*mxfp4.encode(torch.zeros(2, 64)), torch.float32).any()
    ties = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.7, 0.1] + [0.0] * 22])
    rounded = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, 0.0]
    assert mxfp4.decode(*mxfp4.encode(ties), torch.float32)[0, :10].tolist() == rounded


def test_load_weights_draft_layers_are_dropped(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "deepseek_v3", tokenizer=False)
    model = load(checkpoint)
    assert model.load_weights([("model.layers.3.eh_proj.weight", torch.zeros(64, 128))]) == set()
    edit_config(checkpoint, num_nextn_predict_layers=0)
    with pytest.raises(WeightsMismatch, match=r"no tensor 'model\.layers\.3\.eh_proj\.weight'"):
        load(checkpoint).load_weights([("model.layers.3.eh_proj.weight", torch.zeros(64, 128))])
