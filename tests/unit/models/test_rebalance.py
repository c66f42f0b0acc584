"""Rebalancing moves experts and balances the load, and no number depends on the placement."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from checkpoints import make_checkpoint
from expert_ranks import join_experts, open_engines, run_engines
from harness import random_prompt
from model_runs import PagedRun, load
from ranks import DEADLINE, run_ranks, together, topology
from safetensors.torch import load_file, save_file

from eagleray.errors import ExpertGroupBroken
from eagleray.kernels.torch.backend import TorchBackend
from eagleray.messages.workers import EngineOpened
from eagleray.models import registry
from eagleray.models.base import Model
from eagleray.models.moe import rebalance
from eagleray.models.moe.layout import ExpertOptions
from eagleray.models.moe.rebalance import Rebalancer
from eagleray.parallel.expert_group import ExpertGroup
from eagleray.parallel.groups import Groups
from eagleray.parallel.mesh import EnginePosition

NUM_LAYERS, NUM_EXPERTS = 3, 8
INTERVAL = 2
PROMPT = random_prompt(0, 40, 384)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def skewed(request, tmp_path_factory):
    """Return a checkpoint in which two of the three experts of each token are among the first four, which are on the
    first rank."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("skewed"), request.param, tokenizer=False)
    tensors = load_file(checkpoint / "model.safetensors")
    for layer in range(NUM_LAYERS):
        router = tensors[f"model.layers.{layer}.mlp.{'gate' if request.param == 'qwen3_moe' else 'router'}.weight"]
        router[1], router[3] = -router[0], -router[2]
        router[4:] *= 0.02
        if request.param == "gpt_oss":  # its experts have biases, which move with them
            tensors[f"model.layers.{layer}.mlp.router.bias"].zero_()
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


def options(dispatch: str, *, redundant: int = 0, interval: int | None = INTERVAL) -> ExpertOptions:
    return ExpertOptions(dispatch=dispatch, num_redundant=redundant, balance_interval=interval)  # type: ignore[arg-type]


def own_experts(model: Model) -> list[list[int]]:
    """Return the experts in this rank's expert slots, by layer."""
    assert model.rebalancer is not None
    return [slots.local_experts for _, slots in model.rebalancer._layers]


def logits_before_and_after(model: Model, engine: int = 0) -> list[torch.Tensor]:
    """Compute the same prompt repeatedly, with experts moved in between."""
    found: list[torch.Tensor] = []
    for _ in range(2 * INTERVAL):
        run = PagedRun(model)
        if engine == 0:
            run.add("only", PROMPT)
        found += run.step({"only": 40} if engine == 0 else {}).values()
    return found


@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("dispatch", ["all-reduce", "all-gather", "all-to-all"])
@pytest.mark.parametrize("kernels", ["native", "plain"])
def test_rebalance_moves_experts_and_keeps_outputs(skewed, dispatch, redundant, kernels, monkeypatch):
    if kernels == "plain":
        monkeypatch.setattr(registry, "choose_backend", lambda *_, **__: TorchBackend())
    expected = PagedRun(load(skewed))
    expected.add("only", PROMPT)
    whole = expected.run("only", 40)

    def work(groups: Groups):
        model = load(skewed, groups=groups, experts=options(dispatch, redundant=redundant))
        before = own_experts(model)
        found = logits_before_and_after(model)
        assert model.rebalancer is not None
        return found, before, own_experts(model), model.rebalancer.num_moved, model.rebalancer.bytes_moved

    results = run_ranks(work, topology(tp=2))
    for logits in results[0][0]:
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=0)
    if dispatch == "all-to-all" and kernels == "native":
        assert all(torch.equal(logits, results[0][0][0]) for logits in results[0][0])
    for _, before, after, num_moved, num_bytes in results:
        assert before != after
        assert num_moved > 0
        assert num_bytes >= num_moved * 3 * 48 * 64 * 4
    for layer in range(NUM_LAYERS):
        assert {expert for result in results for expert in result[2][layer]} == set(range(NUM_EXPERTS))
        heavy = [len({0, 1, 2, 3} & set(result[2][layer])) for result in results]
        assert min(heavy) >= 1, "those with most tokens are on both ranks"


@pytest.mark.parametrize("redundant", [0, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rebalance_over_engines_has_the_bits_of_whole_model(skewed, dtype, redundant):
    whole = PagedRun(load(skewed, dtype=dtype))
    whole.add("only", PROMPT)
    expected = whole.run("only", 40)

    def work(groups: Groups, engine: int):
        model = load(skewed, groups=groups, dtype=dtype, experts=options("all-to-all", redundant=redundant))
        found = logits_before_and_after(model, engine)
        assert model.rebalancer is not None
        sent = groups.experts.bytes_sent["all_to_all"]
        return found, model.rebalancer.num_moved, sent

    (first,), (second,) = run_engines(work, num_engines=2)
    assert len(first[0]) == 2 * INTERVAL and not second[0]
    assert all(torch.equal(logits, expected) for logits in first[0])
    assert redundant or first[1] + second[1] > 0  # with redundant experts there may be little to gain
    assert first[2] > 0 and second[2] > 0


def test_rebalance_balanced_experts_stay(tmp_path):
    checkpoint = make_checkpoint(tmp_path, "qwen3_moe", tokenizer=False)

    def work(groups: Groups) -> int:
        model = load(checkpoint, groups=groups, experts=options("all-to-all"))
        assert model.rebalancer is not None
        assert model.trace is not None
        model.trace.counts.fill_(7)
        for _ in range(2 * INTERVAL):
            model.rebalance_if_due()
        return model.rebalancer.num_moved

    assert run_ranks(work, topology(tp=2)) == [0, 0]


def test_rebalance_update_open_on_one_rank_moves_no_experts_on_any(skewed):
    def work(groups: Groups) -> tuple[list[list[int]], list[list[int]]]:
        model = load(skewed, groups=groups, experts=options("all-to-all"))
        assert model.trace is not None
        model.trace.counts[:, :2] += 100  # the experts of one rank have all tokens
        update = model.start_update() if groups.tp.rank == 1 else None
        for _ in range(INTERVAL):
            model.rebalance_if_due()
        kept = own_experts(model)
        if update is not None:
            update.drop()
        for _ in range(INTERVAL):
            model.rebalance_if_due()
        return kept, own_experts(model)

    results = run_ranks(work, topology(tp=2))
    assert [kept for kept, _ in results] == [[[0, 1, 2, 3]] * NUM_LAYERS, [[4, 5, 6, 7]] * NUM_LAYERS]
    assert all(moved != kept for kept, moved in results)


def test_on_group_formed_replaced_engine_restores_lost_experts(skewed):
    """The successor has the initial experts; experts that no rank has are read again."""
    whole = PagedRun(load(skewed))
    whole.add("only", PROMPT)
    expected = whole.run("only", 40)

    def begin(groups: Groups, engine: int) -> Model:
        model = load(skewed, groups=groups, experts=options("all-to-all"))
        model.on_group_formed()
        return model

    def step(model: Model, engine: int) -> list[torch.Tensor]:
        run = PagedRun(model)
        if engine == 0:
            run.add("only", PROMPT)
        return list(run.step({"only": 40} if engine == 0 else {}).values())

    engines = open_engines(2)
    join_experts(engines)
    models = together([partial(begin, ranks[0], engine) for engine, ranks in enumerate(engines)])
    for _ in range(INTERVAL):
        together([partial(step, model, engine) for engine, model in enumerate(models)])
    moved = own_experts(models[0])
    assert moved != [[0, 1, 2, 3]] * NUM_LAYERS

    engines[1][0].close()  # and start its successor
    engines[1] = open_engines(2)[1]
    models[1] = load(skewed, groups=engines[1][0], experts=options("all-to-all"))
    join_experts(engines, epoch=2)
    together([model.on_group_formed for model in models])
    for first, second in zip(*map(own_experts, models), strict=True):
        assert sorted(first + second) == list(range(NUM_EXPERTS))
    for _ in range(2 * INTERVAL):
        (logits,), nothing = together([partial(step, model, engine) for engine, model in enumerate(models)])
        assert torch.equal(logits, expected) and not nothing
    for ranks in engines:
        ranks[0].close()


@pytest.mark.parametrize("redundant", [0, 2])
def test_on_group_formed_other_engines_experts_come_from_ranks_that_have_them(skewed, redundant, monkeypatch):
    """2 engines, then 3, then one of the first two leaves, then one is left: no weight is read from the checkpoint
    except for an engine that is killed in the middle of an exchange."""
    whole = PagedRun(load(skewed))
    whole.add("only", PROMPT)
    expected = whole.run("only", 40)
    num_read: list[int] = []
    restore = Rebalancer._restore
    monkeypatch.setattr(
        Rebalancer, "_restore", lambda self, lost, **now: num_read.append(len(lost)) or restore(self, lost, **now)
    )
    engines = {rank: groups[0] for rank, groups in enumerate(open_engines(2))}
    models: dict[int, Model] = {}
    lacking: dict[int, bool] = {}
    epochs = iter(range(1, 100))

    def add(rank: int, *, size: int | None = None) -> None:
        experts = replace(options("all-to-all", redundant=redundant, interval=None), gets_experts=size is not None)
        if size is not None:
            engines[rank] = open_engines(2)[1][0]
            engines[rank].experts.set_position(EnginePosition(size=size))
        models[rank] = load(skewed, groups=engines[rank], experts=experts)

    def form(
        *ranks: int, leaving: tuple[int, ...] = (), breaks_at: int | None = None, arrives: bool = True
    ) -> list[list[list[int]]]:
        """Form a group and return the experts of each rank by layer. The last one exits in the layer `breaks_at`, where
        the exchange has begun if not `arrives`, as on a GPU."""
        epoch = next(epochs)
        members = [
            EngineOpened(
                rank=rank,
                topology=topology(),
                opened=[engines[rank].experts.open(epoch, EnginePosition(rank=ranks.index(rank), size=len(ranks)))],
            )
            for rank in ranks
        ]
        together([partial(engines[rank].experts.join, epoch, members, timeout=DEADLINE) for rank in ranks])
        left = [ranks.index(rank) for rank in leaving]

        def synchronize(rank: int) -> None:
            if breaks_at is not None and not arrives:
                group, sent = engines[rank].experts, iter(range(100))

                def begin(rows, send_counts, receive_counts):
                    if next(sent) < breaks_at:
                        return ExpertGroup.all_to_all(group, rows, send_counts, receive_counts)
                    group.wait_until_done = break_group
                    return rows.new_full((sum(receive_counts), *rows.shape[1:]), 255)

                def break_group():
                    del group.wait_until_done, group.all_to_all
                    raise ExpertGroupBroken("it has not arrived")

                group.all_to_all = begin
            elif breaks_at is not None and rank == ranks[-1]:
                exchange, count = models[rank].rebalancer._exchange, iter(range(100))

                def exit_before(*args, **widths):
                    if next(count) == breaks_at:
                        engines[rank].close()
                    exchange(*args, **widths)

                models[rank].rebalancer._exchange = exit_before
            if breaks_at is None:
                lacking[rank] = models[rank].on_group_formed(leaving=left) is not None
            else:
                with pytest.raises(ExpertGroupBroken):
                    models[rank].on_group_formed(leaving=left)

        together([partial(synchronize, rank) for rank in ranks])
        return [own_experts(models[rank]) for rank in ranks]

    def compute(rank: int, *ranks: int) -> torch.Tensor:
        def step(each: int) -> list[torch.Tensor]:
            run = PagedRun(models[each])
            if each == rank:
                run.add("only", PROMPT)
            return list(run.step({"only": 40} if each == rank else {}).values())

        found = together([partial(step, each) for each in ranks])
        return found[ranks.index(rank)][0]

    def check(experts: list[list[list[int]]], per_rank: int) -> None:
        for layer in range(NUM_LAYERS):
            of_ranks = [own[layer] for own in experts]
            assert {expert for own in of_ranks for expert in own} == set(range(NUM_EXPERTS))
            assert all(len(own) == len(set(own)) == per_rank for own in of_ranks)

    add(0), add(1)
    check(form(0, 1), (NUM_EXPERTS + redundant) // 2)
    assert torch.equal(compute(0, 0, 1), expected)

    add(2, size=3)
    form(0, 1, 2, breaks_at=1)
    check(form(0, 1), (NUM_EXPERTS + redundant) // 2)  # nothing of the first two is lost
    assert torch.equal(compute(1, 0, 1), expected)
    add(2, size=4)
    form(0, 1, 2, breaks_at=1, arrives=False)  # what has not arrived does not count as present
    check(form(0, 1, 2), -(-(NUM_EXPERTS + redundant) // 3))
    assert torch.equal(compute(2, 0, 1, 2), expected)

    with monkeypatch.context() as patch:
        patch.setattr(rebalance, "_free_bytes", lambda device, num_ranks: 10_000)
        before = [own_experts(models[rank]) for rank in (0, 1, 2)]
        assert form(0, 1, 2, leaving=(0,)) == before
        assert lacking == {0: False, 1: True, 2: True}
        assert torch.equal(compute(2, 0, 1, 2), expected)
    staying = form(0, 1, 2, leaving=(0,))[1:]
    assert torch.equal(compute(0, 0, 1, 2), expected), "the one that leaves still computes its requests"
    check(staying, (NUM_EXPERTS + redundant) // 2)
    assert form(1, 2) == staying
    assert torch.equal(compute(2, 1, 2), expected)
    form(1, 2, leaving=(1,))
    check(form(2), NUM_EXPERTS)
    assert torch.equal(compute(2, 2), expected)
    assert sum(num_read) == 0

    engines[2].close()
    add(2, size=1)
    form(2)
    assert sum(num_read) == NUM_LAYERS * NUM_EXPERTS
    assert torch.equal(compute(2, 2), expected)
    num_read.clear()

    add(5, size=2)
    form(2, 5)
    engines[2].close()
    add(2, size=2)
    form(2, 5)
    assert sum(num_read) == NUM_LAYERS * (NUM_EXPERTS // 2 - redundant // 2)
    assert torch.equal(compute(5, 2, 5), expected)
    for groups in engines.values():
        groups.close()
