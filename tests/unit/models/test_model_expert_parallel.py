"""Experts that are divided among ranks, of one engine or of several, give the logits of a model that has them all."""

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
"""Sums are computed in another order."""

PROMPT = random_prompt(0, 50, 384)
CHUNKS = (21, 1)
"""With 21 rows two ranks have 11 and 10; with 1, one of them has none."""

FAMILIES = {
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe, a dense layer": ("qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}),
    "mixtral": ("mixtral", {}),
    "deepseek_v3": ("deepseek_v3", {}),
    "gpt_oss": ("gpt_oss", {}),
}


@pytest.fixture(autouse=True)
def one_thread():
    """Several ranks compute at the same time here."""
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
    """By rank, and then by chunk."""

    def work(groups: Groups) -> list[torch.Tensor]:
        model = load(checkpoint, groups=groups, **options)
        return [logits_in_chunks(model, PROMPT, chunk) for chunk in CHUNKS]

    return run_ranks(work, where)


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("case", FAMILIES)
def test_over_the_ranks_of_an_engine(checkpoints, case, dispatch):
    """They are transformers' logits."""
    checkpoint = checkpoints(case)
    expected = Oracle(checkpoint).logits(PROMPT)
    for logits in logits_of_ranks(checkpoint, topology(tp=2), experts=OPTIONS[dispatch])[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_in_plain_torch(checkpoints, dispatch, plain_kernels):
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    for logits in logits_of_ranks(checkpoint, topology(tp=2), experts=OPTIONS[dispatch])[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_in_stages_too(checkpoints, dispatch):
    checkpoint = checkpoints("qwen3_moe, a dense layer")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    for logits in logits_of_ranks(checkpoint, topology(tp=2, pp=2), experts=OPTIONS[dispatch])[2]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
def test_over_four_ranks_with_copies(checkpoints, dispatch):
    """Eight experts and four copies: three slots each."""
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint), PROMPT, 50)
    options = ExpertOptions(dispatch=dispatch, num_redundant=4)
    for logits in logits_of_ranks(checkpoint, topology(tp=4), experts=options)[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_half_precision_is_as_near_to_float32_as_the_whole_model(checkpoints, dispatch, kernels, request):
    if kernels == "plain":
        request.getfixturevalue("plain_kernels")
    checkpoint = checkpoints("qwen3_moe")

    def error(logits: torch.Tensor) -> float:
        return (logits - exact).pow(2).mean().sqrt().item()

    exact = logits_in_chunks(load(checkpoint), PROMPT, 50)
    whole = error(logits_in_chunks(load(checkpoint, dtype="bfloat16"), PROMPT, 50))
    for logits in logits_of_ranks(checkpoint, topology(tp=2), dtype="bfloat16", experts=OPTIONS[dispatch])[0]:
        assert error(logits) < 1.5 * whole


def test_dummy_experts_are_the_same_wherever_they_are(checkpoints):
    checkpoint = checkpoints("qwen3_moe")
    expected = logits_in_chunks(load(checkpoint, load_format="dummy", seed=3), PROMPT, 50)
    options = {"load_format": "dummy", "seed": 3, "experts": OPTIONS["all-to-all"]}
    for logits in logits_of_ranks(checkpoint, topology(tp=2), **options)[0]:
        torch.testing.assert_close(logits, expected, atol=ROUNDING, rtol=0)


LENGTHS = ({"long": 45, "short": 9}, {"late": 30}, {})
"""Of the sequences of each engine."""

SCHEDULES = (
    [{"long": 17}, {"long": 1, "short": 8}, {"long": 20, "short": 1}, {"long": 7}, {}, {}],
    [{}, {}, {"late": 5}, {"late": 24}, {"late": 1}, {}],
    [{}, {}, {}, {}, {}, {}],
)
"""What each engine computes in each step, all together; the last step is nobody's."""


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
def test_engines_with_different_numbers_of_tokens(checkpoints, case, num_engines, tp, dispatch):
    """One of them begins later, ends later, or has nothing."""
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
def test_engines_in_plain_torch(checkpoints, dispatch, plain_kernels):
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
def test_all_to_all_gives_the_bits_of_the_whole_model(checkpoints, case, dtype, num_engines, monkeypatch):
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
def test_bytes_go_the_way_that_was_asked_for(checkpoints, dispatch):
    checkpoint = checkpoints("qwen3_moe")

    def work(groups: Groups) -> dict[str, int]:
        logits_in_chunks(load(checkpoint, groups=groups, experts=OPTIONS[dispatch]), PROMPT, 50)
        return dict(groups.experts.bytes_sent)

    for sent in run_ranks(work, topology(tp=2)):
        if dispatch == "all-to-all":
            assert sent["all_to_all"] > 50 / 2 * 64 * 4  # each rank's rows of some layers, at least
        else:
            assert "all_to_all" not in sent
        assert ("reduce_scatter" in sent) == (dispatch != "all-reduce")
        if dispatch == "all-reduce":
            assert sent["all_reduce"] > 0


def test_a_row_is_sent_once_to_a_rank_with_several_of_its_experts(checkpoints):
    """Two ranks: at most one copy of each row leaves, whatever its experts are."""
    checkpoint = checkpoints("qwen3_moe")

    def work(groups: Groups, engine: int) -> int:
        model = load(checkpoint, groups=groups, experts=OPTIONS["all-to-all"])
        run = PagedRun(model)
        if engine == 0:
            run.add("only", PROMPT)
        run.step({"only": 50} if engine == 0 else {})
        return groups.experts.bytes_sent["all_to_all"]

    sent = run_engines(work, num_engines=2)[0][0]
    row, layers = 64 * 4 + 3 * 4, 3  # hidden state and three slots
    assert 0 < sent <= layers * 50 * row


@pytest.mark.parametrize("dispatch", OPTIONS)
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_what_was_routed_is_known_by_the_models_own_numbers(checkpoints, dispatch, kernels, request):
    """Ids of all rows, of the rank's share under sequence parallelism; every pair is counted."""
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
    (first, first_counts, shares), (second, second_counts, _) = run_ranks(work, topology(tp=2))
    assert shares == (dispatch != "all-reduce")
    if shares:
        assert torch.equal(torch.cat([first, second]), expected)
        assert torch.equal(first_counts + second_counts, whole.counts)
    else:
        assert torch.equal(first, expected) and torch.equal(second, expected)
        assert torch.equal(first_counts, whole.counts) and torch.equal(second_counts, whole.counts)
    assert whole.counts.sum() == 21 * 2 * 3


def test_a_batch_of_no_tokens_computes_nothing_where_nobody_works(checkpoints):
    model = load(checkpoints("qwen3_moe"))
    run = PagedRun(model)
    assert run.step({}) == {}
    empty = model.forward(run._batch([], {}), run.cache)
    assert empty.shape == (0, 64)
    run.add("only", PROMPT)
    assert torch.equal(run.run("only", 50), logits_in_chunks(model, PROMPT, 50))


def test_only_the_experts_of_a_rank_are_read(checkpoints, tmp_path):
    """A checkpoint without the others' is as good, one without an own expert is not."""
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
def test_progress_is_that_of_the_ranks_share(checkpoints, dispatch):
    checkpoint = checkpoints("deepseek_v3")
    size = (checkpoint / "model.safetensors").stat().st_size

    def work(groups: Groups) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        load(checkpoint, groups=groups, experts=OPTIONS[dispatch], on_progress=lambda *now: told.append(now))
        return told

    for told in run_ranks(work, topology(tp=2)):
        assert told == sorted(told)
        ((total),) = {total for _, total in told}
        assert 0.3 * size < total < 0.8 * size
        assert 0.8 * total < told[-2][0] <= total
        assert told[-1] == (total, total)


def test_more_experts_than_can_be_reported(checkpoints, tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "MAX_TRACED_EXPERTS", 7)
    with pytest.raises(ConfigError, match="`enable_return_routed_experts`: the model has 8 experts, more than the 7"):
        load(checkpoints("qwen3_moe"), experts=ExpertOptions(keeps_ids=True))
    load(checkpoints("qwen3_moe"))


def test_kernels_that_cannot_move_experts(checkpoints, monkeypatch):
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: OneDnnBackend())
    options = ExpertOptions(dispatch="all-reduce", balance_interval=5)

    def work(groups: Groups) -> str:
        with pytest.raises(ConfigError) as error:
            load(checkpoints("qwen3_moe"), groups=groups, experts=options)
        return str(error.value)

    for message in run_ranks(work, topology(tp=2)):
        assert message.startswith(
            "option `enable_eplb`: what computes here keeps weights in a form that cannot be moved"
        )
    monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    assert all(run_ranks(lambda groups: load(checkpoints("qwen3_moe"), groups=groups, experts=options), topology(tp=2)))


def test_one_rank_has_all_experts(checkpoints):
    """Nothing to divide: as without the option."""
    model = load(checkpoints("qwen3_moe"), experts=OPTIONS["all-to-all"])
    assert model.rebalancer is None and not model.exchanges_tokens
    assert torch.equal(
        logits_in_chunks(model, PROMPT, 50), logits_in_chunks(load(checkpoints("qwen3_moe")), PROMPT, 50)
    )


def test_schedules_are_as_long_as_each_other():
    assert {len(schedule) for schedule in SCHEDULES} == {6}
    for lengths, schedule in zip(LENGTHS, SCHEDULES, strict=True):
        computed = {name: sum(counts.get(name, 0) for counts in schedule) for name in itertools.chain(*schedule)}
        assert computed == lengths
