"""A model whose experts are divided among the ranks of one or several engines has the logits of the whole model."""

from __future__ import annotations

import itertools

import pytest
import torch
from checkpoints import make_checkpoint
from expert_ranks import OPTIONS, run_engines
from harness import random_prompt
from model_runs import PagedRun, load, logits_in_chunks
from oracle import Oracle
from ranks import run_ranks, topology
from safetensors.torch import load_file, save_file

from eagleray.errors import CheckpointError, ConfigError
from eagleray.kernels.expert_trace import ExpertTrace
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.kernels.torch.onednn import OneDnnBackend
from eagleray.models import registry
from eagleray.models.moe.layout import ExpertOptions
from eagleray.parallel.groups import Groups

ROUNDING = 1e-4
"""Tolerance for sums that are computed in another order."""

PROMPT = random_prompt(0, 50, 384)
CHUNKS = (21, 1)
"""Chunk sizes. Two ranks have 11 and 10 of 21 tokens; one rank has none of 1 token."""

FAMILIES = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Use one thread, because several ranks compute at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    made = {}

    def find(case: str):
        if case not in made:
            family, overrides = FAMILIES[case]
            made[case] = make_checkpoint(tmp_path_factory.mktemp("made"), family, tokenizer=False, **overrides)
        return made[case]

    return find


@pytest.fixture
def plain_kernels(monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: OneDnnBackend())


def logits_of_ranks(checkpoint, where, **options) -> list[list[torch.Tensor]]:
    """Return the logits by rank, then by chunk."""

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups, **options)
        return [logits_in_chunks(model, PROMPT, chunk) for chunk in CHUNKS]

    return run_ranks(work, where)


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("case", FAMILIES)
def test_forward_over_ranks_equals_transformers(checkpoints, case, dispatch):
    checkpoint = checkpoints(case)
    expected = Oracle(checkpoint).logits(PROMPT)
    for logits in logits_of_ranks(checkpoint, topology(tp=2), experts=OPTIONS[dispatch])[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.grid  # in plain torch: engines below in float32, ranks below in bfloat16
@pytest.mark.parametrize("dispatch", OPTIONS)
def test_forward_over_ranks_in_plain_torch_equals_whole_model(checkpoints, dispatch, plain_kernels):
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    for logits in logits_of_ranks(checkpoint, topology(tp=2), experts=OPTIONS[dispatch])[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_forward_over_ranks_and_stages_equals_whole_model(checkpoints, dispatch):
    checkpoint = checkpoints("qwen3_moe, a dense layer")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    for logits in logits_of_ranks(checkpoint, topology(tp=2, pp=2), experts=OPTIONS[dispatch])[2]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_forward_over_ranks_with_redundant_experts_equals_whole_model(checkpoints, dispatch):
    """Eight experts and four copies give each rank three expert slots."""
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    options = ExpertOptions(dispatch=dispatch, num_redundant=4)
    for logits in logits_of_ranks(checkpoint, topology(tp=4), experts=options)[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_forward_bfloat16_is_as_close_to_float32_as_whole_model(checkpoints, dispatch, kernels, request):
    if kernels == "plain":
        request.getfixturevalue("plain_kernels")
    checkpoint = checkpoints("qwen3_moe")

    def error(logits: torch.Tensor) -> float:
        return (logits - exact).pow(2).mean().sqrt().item()

    exact = logits_in_chunks(load(checkpoint), PROMPT, 50)
    whole = error(logits_in_chunks(load(checkpoint, dtype="bfloat16"), PROMPT, 50))
    for logits in logits_of_ranks(checkpoint, topology(tp=2), dtype="bfloat16", experts=OPTIONS[dispatch])[0]:
        assert error(logits) < 1.5 * whole


def test_load_model_dummy_experts_equal_whole_model(checkpoints):
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint, load_format="dummy", seed=3), PROMPT, 50)
    options = {"load_format": "dummy", "seed": 3, "experts": OPTIONS["all-to-all"]}
    for logits in logits_of_ranks(checkpoint, topology(tp=2), **options)[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


LENGTHS = ({"long": 45, "short": 9}, {"late": 30}, {})
"""Lengths of the sequences of each engine."""

SCHEDULES = (
    [{"long": 17}, {"long": 1, "short": 8}, {"long": 20, "short": 1}, {"long": 7}, {}, {}],
    [{}, {}, {"late": 5}, {"late": 24}, {"late": 1}, {}],
    [{}, {}, {}, {}, {}, {}],
)
"""Tokens that each engine computes in each common step. No engine is busy in the last step."""


def run_schedule(model, engine: int) -> dict[str, torch.Tensor]:
    run = PagedRun(model)
    for name, length in LENGTHS[engine].items():
        run.add(name, random_prompt(len(name), length, 384))
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in LENGTHS[engine]}
    for counts in SCHEDULES[engine]:
        for name, logits in run.step(counts).items():
            pieces[name].append(logits)
    return {name: torch.cat(parts) if parts else torch.empty(0) for name, parts in pieces.items()}


def run_alone(checkpoint, engine: int, **options) -> dict[str, torch.Tensor]:
    return run_schedule(load(checkpoint, **options), engine)


@pytest.mark.parametrize("dispatch", ["all-gather", "all-to-all"])
@pytest.mark.parametrize(("num_engines", "tp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("case", ["qwen3_moe", "deepseek_v3"])
def test_forward_engines_with_different_token_counts_equal_whole_model(checkpoints, case, num_engines, tp, dispatch):
    """An engine begins later, finishes later, or has no tokens."""
    checkpoint = checkpoints(case)
    found = run_engines(
        lambda groups, engine: run_schedule(load(checkpoint, groups=groups, experts=OPTIONS[dispatch]), engine),
        num_engines=num_engines,
        tp=tp,
    )
    for engine in range(num_engines):
        expected = run_alone(checkpoint, engine)
        assert found[engine][0].keys() == expected.keys()
        for name, logits in expected.items():
            torch.testing.assert_close(found[engine][0][name], logits, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", ["all-gather", "all-to-all"])
def test_forward_engines_in_plain_torch_equal_whole_model(checkpoints, dispatch, plain_kernels):
    checkpoint = checkpoints("deepseek_v3")
    found = run_engines(
        lambda groups, engine: run_schedule(load(checkpoint, groups=groups, experts=OPTIONS[dispatch]), engine),
        num_engines=2,
        tp=2,
    )
    for engine in range(2):
        for name, logits in run_alone(checkpoint, engine).items():
            torch.testing.assert_close(found[engine][0][name], logits, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen3_moe", "mixtral", "deepseek_v3"])
@pytest.mark.parametrize("num_engines", [2, 4])
def test_forward_all_to_all_has_the_bits_of_whole_model(checkpoints, case, dtype, num_engines, monkeypatch):
    checkpoint = checkpoints(case)
    monkeypatch.setitem(globals(), "LENGTHS", (*LENGTHS, {"other": 20}))
    monkeypatch.setitem(globals(), "SCHEDULES", (*SCHEDULES, [{"other": 1}] * 6))

    def work(groups: Groups, engine: int) -> dict[str, torch.Tensor]:
        model = load(checkpoint, groups=groups, dtype=dtype, experts=OPTIONS["all-to-all"])
        return run_schedule(model, engine)

    found = run_engines(work, num_engines=num_engines)
    for engine in range(num_engines):
        for name, logits in run_alone(checkpoint, engine, dtype=dtype).items():
            assert torch.equal(found[engine][0][name], logits), f"{name} of engine {engine}"


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_forward_sends_bytes_by_the_chosen_dispatch(checkpoints, dispatch):
    checkpoint = checkpoints("qwen3_moe")

    def work(groups: Groups) -> dict[str, int]:
        logits_in_chunks(load(checkpoint, groups=groups, experts=OPTIONS[dispatch]), PROMPT, 50)
        return dict(groups.experts.bytes_sent)

    for sent in run_ranks(work, topology(tp=2)):
        if dispatch == "all-to-all":
            assert sent["all_to_all"] > 50 / 2 * 64 * 4  # at least each rank's tokens in some layers
        else:
            assert "all_to_all" not in sent
        assert ("reduce_scatter" in sent) == (dispatch != "all-reduce")
        if dispatch == "all-reduce":
            assert sent["all_reduce"] > 0


def test_forward_all_to_all_sends_a_token_once_per_rank(checkpoints):
    """Two ranks send at most one copy of each token, whatever its experts are."""
    checkpoint = checkpoints("qwen3_moe")

    def work(groups: Groups, engine: int) -> int:
        model = load(checkpoint, groups=groups, experts=OPTIONS["all-to-all"])
        run = PagedRun(model)
        if engine == 0:
            run.add("only", PROMPT)
        run.step({"only": 50} if engine == 0 else {})
        return groups.experts.bytes_sent["all_to_all"]

    sent = run_engines(work, num_engines=2)[0][0]
    row, layers = 64 * 4 + 3 * 4, 3  # hidden state and three expert slots
    assert 0 < sent <= layers * 50 * row


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_trace_holds_the_models_own_expert_numbers(checkpoints, dispatch, kernels, request):
    """The trace has the ids of all tokens, or of the rank's tokens under sequence parallelism; every pair is
    counted."""
    if kernels == "plain":
        request.getfixturevalue("plain_kernels")
    checkpoint = checkpoints("qwen3_moe, a dense layer")

    def trace_of(model) -> ExpertTrace:
        assert model.trace is not None
        run = PagedRun(model)
        run.add("only", PROMPT)
        run.step({"only": 21})
        return model.trace

    def work(groups: Groups) -> tuple[torch.Tensor, torch.Tensor, bool]:
        options = ExpertOptions(dispatch=dispatch, keeps_ids=True)
        model = load(checkpoint, groups=groups, experts=options)
        trace = trace_of(model)
        num_rows = [11, 10][groups.tp.rank] if model.has_sequence_shards else 21
        return trace.ids(range(num_rows), num_rows), trace.counts, model.has_sequence_shards

    whole = trace_of(load(checkpoint, experts=ExpertOptions(keeps_ids=True)))
    expected = whole.ids(range(21), 21)
    assert expected.shape == (21, 2, 3)
    (first, first_counts, is_sharded), (second, second_counts, _) = run_ranks(work, topology(tp=2))
    assert is_sharded == (dispatch != "all-reduce")
    if is_sharded:
        assert torch.equal(torch.cat([first, second]), expected)
        assert torch.equal(first_counts + second_counts, whole.counts)
    else:
        assert torch.equal(first, expected) and torch.equal(second, expected)
        assert torch.equal(first_counts, whole.counts) and torch.equal(second_counts, whole.counts)
    assert whole.counts.sum() == 21 * 2 * 3


def test_forward_no_tokens_on_idle_engines_computes_nothing(checkpoints):
    model = load(checkpoints("qwen3_moe"))
    run = PagedRun(model)
    assert run.step({}) == {}
    empty = model.forward(run._batch([], {}), run.cache)
    assert empty.shape == (0, 64)
    run.add("only", PROMPT)
    assert torch.equal(run.run("only", 50), logits_in_chunks(model, PROMPT, 50))


def test_load_model_reads_only_the_ranks_experts(checkpoints, tmp_path):
    """A rank loads a checkpoint without the experts of other ranks, but not one without its own."""
    whole = checkpoints("qwen3_moe")
    tensors = load_file(whole / "model.safetensors")
    others = [name for name in tensors if any(f".experts.{expert}." in name for expert in range(4, 8))]
    assert len(others) == 3 * 4 * 3
    save_file({name: tensors[name] for name in tensors.keys() - others}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((whole / "config.json").read_text())

    def work(groups: Groups) -> tuple[int, str]:
        try:
            return load(tmp_path, groups=groups, experts=OPTIONS["all-reduce"]).num_parameters, ""
        except CheckpointError as error:
            return 0, str(error)

    (num_parameters, first), (_, second) = run_ranks(work, topology(tp=2))
    assert first == "" and num_parameters > 0
    assert "experts.4.gate_proj.weight' of shape [48, 64] is missing" in second


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_load_model_reports_progress_of_the_ranks_experts(checkpoints, dispatch):
    checkpoint = checkpoints("deepseek_v3")
    size = (checkpoint / "model.safetensors").stat().st_size

    def work(groups: Groups) -> list[tuple[int, int]]:
        reported: list[tuple[int, int]] = []
        load(checkpoint, groups=groups, experts=OPTIONS[dispatch], on_progress=lambda *now: reported.append(now))
        return reported

    for reported in run_ranks(work, topology(tp=2)):
        assert reported == sorted(reported)
        ((total),) = {total for _, total in reported}
        assert 0.3 * size < total < 0.8 * size
        assert 0.8 * total < reported[-2][0] <= total
        assert reported[-1] == (total, total)


def test_load_model_too_many_experts_to_trace_is_refused(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MAX_TRACED_EXPERTS", 7)
    with pytest.raises(ConfigError, match="`enable_return_routed_experts`: the model has 8 experts, more than the 7"):
        load(checkpoints("qwen3_moe"), experts=ExpertOptions(keeps_ids=True))
    load(checkpoints("qwen3_moe"))


@pytest.mark.parametrize("make", [OneDnnBackend, TorchBackend])
def test_load_model_eplb_on_backends_of_torch_loads(make, checkpoints, monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: make())
    options = ExpertOptions(dispatch="all-reduce", balance_interval=5)
    models = run_ranks(lambda groups: load(checkpoints("qwen3_moe"), groups=groups, experts=options), topology(tp=2))
    assert all(model.rebalancer is not None for model in models)


def test_load_model_single_rank_divides_no_experts(checkpoints):
    """The option has no effect with a single rank."""
    model = load(checkpoints("qwen3_moe"), experts=OPTIONS["all-to-all"])
    assert model.rebalancer is None and not model.exchanges_tokens
    assert torch.equal(
        logits_in_chunks(model, PROMPT, 50), logits_in_chunks(load(checkpoints("qwen3_moe")), PROMPT, 50)
    )


def test_schedules_have_the_same_length():
    assert {len(schedule) for schedule in SCHEDULES} == {6}
    for lengths, schedule in zip(LENGTHS, SCHEDULES, strict=True):
        computed = {name: sum(counts.get(name, 0) for counts in schedule) for name in itertools.chain(*schedule)}
        assert computed == lengths
