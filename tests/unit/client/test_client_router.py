"""The choice of an engine for a request."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagleray.client.routing.router import Router, rendezvous_hash
from eagleray.errors import InvalidRequest, Unavailable
from eagleray.identity import EngineId
from eagleray.messages.membership import EngineInfo
from eagleray.messages.outputs import EngineStats

INFO = EngineInfo(architecture="Tiny", vocab_size=500, max_model_len=4096, block_size=4, num_kv_blocks=1000)
PROMPT = list(range(30))


def engine(rank, incarnation=0):
    return EngineId("test", rank, incarnation)


def router_of(num_engines, *, seed=0, match_prefixes=True):
    router = Router(rng=random.Random(seed), match_prefixes=match_prefixes)
    for rank in range(num_engines):
        router.add_engine(engine(rank), INFO)
    return router


def stats(rank, num_running, *, num_waiting=0, num_free=1000):
    counts = dict.fromkeys(
        ["num_steps", "num_preemptions", "num_prompt_tokens", "num_generation_tokens", "num_prefix_queries"], 0
    )
    return EngineStats(
        engine=engine(rank),
        num_running=num_running,
        num_waiting=num_waiting,
        num_kv_blocks=1000,
        num_free_kv_blocks=num_free,
        num_prefix_hits=0,
        **counts,
    )


def send(router, token_ids, **constraints):
    """Send a request, and return the rank of its engine and the match of its prompt."""
    decision = router.choose(token_ids, **constraints)
    return decision.engine.rank, router.record_sent(decision)


def fresh_prompt(rng, length=12):
    return [rng.randrange(10**6) for _ in range(length)]


# Named engines.


def test_choose_with_rank_returns_its_engine():
    router = router_of(3)
    assert [send(router, PROMPT, rank=rank)[0] for rank in (2, 2, 0, 1)] == [2, 2, 0, 1]
    assert send(router, PROMPT, rank=2, session="s")[0] == 2
    router.remove_engine(engine(1), cause="killed", will_restart=True)
    assert router.choose(PROMPT, rank=1) is None
    router.add_engine(engine(1, 1), INFO)
    assert router.choose(PROMPT, rank=1).engine == engine(1, 1)


@pytest.mark.parametrize(("given_up", "expected_ranks"), [((), "0-5"), ((1,), "0, 2-5"), ((0, 2, 4), "1, 3, 5")])
def test_choose_unknown_rank_raises_with_known_ranks(given_up, expected_ranks):
    router = router_of(6)
    for rank in given_up:
        router.remove_engine(engine(rank), cause="given up", will_restart=False)
    with pytest.raises(InvalidRequest) as raised:
        router.choose(PROMPT, rank=6)
    assert str(raised.value) == f"there is no data-parallel rank 6: the ranks of this deployment are {expected_ranks}"
    assert raised.value.param == "X-data-parallel-rank"


def test_choose_rank_that_was_removed_raises_until_it_is_added_again():
    router = Router(rng=random.Random(0), ranks=(0, 1))
    router.add_engine(engine(0), INFO)
    assert router.choose(PROMPT, rank=1) is None  # it is starting
    router.remove_engine(engine(1), cause="engine-1 left: scaled", will_restart=False, is_planned=True)
    message = r"no data-parallel rank 1 any more \(engine-1 left: scaled\): the ranks of this deployment are 0$"
    with pytest.raises(InvalidRequest, match=message):
        router.choose(PROMPT, rank=1)
    assert router.known_engines.deployed_ranks == [0]
    router.add_engine(engine(1, 1), INFO)
    router.add_engine(engine(2), INFO)
    assert [send(router, PROMPT, rank=rank)[0] for rank in (1, 2)] == [1, 2]
    router.remove_engine(engine(2), cause="it cannot start", will_restart=False)
    assert router.known_engines.deployed_ranks == [0, 1, 2]
    with pytest.raises(Unavailable, match="it cannot start"):
        router.choose(PROMPT, rank=2)


def test_choose_skips_draining_engines_while_there_is_another():
    router = router_of(3)
    session = next(name for name in map(str, range(99)) if send(router, [1], session=name)[0] == 2)
    send(router, PROMPT, rank=2)
    router.drain(engine(2))
    rng = random.Random(1)
    ranks = {send(router, fresh_prompt(rng))[0] for _ in range(50)}  # rank 2 has fewer requests
    assert ranks | {send(router, PROMPT)[0], send(router, PROMPT, session=session)[0]} == {0, 1}
    assert send(router, PROMPT, rank=2)[0] == 2
    router.drain(engine(0))
    router.drain(engine(1))
    assert send(router, PROMPT, session=session)[0] == 2  # all of them drain
    router.remove_engine(engine(2), cause="left", will_restart=True, is_planned=True)
    router.add_engine(engine(2, 1), INFO)
    assert {send(router, fresh_prompt(rng))[0] for _ in range(9)} == {2}


def test_choose_with_session_is_same_for_all_clients():
    routers = [router_of(8, seed=seed) for seed in range(3)]
    for number in range(50):
        session = f"session {number}"
        assert len({send(router, fresh_prompt(random.Random(number)), session=session)[0] for router in routers}) == 1


@given(session=st.text(max_size=8), ranks=st.sets(st.integers(0, 100), min_size=2), data=st.data())
def test_rendezvous_hash_without_rank_moves_only_its_sessions(session, ranks, data):
    home = rendezvous_hash(session, ranks)
    away = data.draw(st.sampled_from(sorted(ranks)))
    assert home in ranks
    assert rendezvous_hash(session, ranks - {away}) != away
    if away != home:
        assert rendezvous_hash(session, ranks - {away}) == home


def test_rendezvous_hash_spreads_sessions():
    counts = Counter(rendezvous_hash(f"user {number}", range(8)) for number in range(4000))
    assert min(counts.values()) > 400 and max(counts.values()) < 600


def test_choose_session_returns_with_its_engine():
    router = router_of(4)
    home, _ = send(router, PROMPT, session="s")
    router.remove_engine(engine(home), cause="killed", will_restart=True)
    elsewhere, _ = send(router, PROMPT, session="s")
    assert elsewhere != home
    router.add_engine(engine(home, 1), INFO)
    assert send(router, PROMPT, session="s")[0] == home


def test_choose_without_engines_returns_none():
    router = Router(rng=random.Random(0))
    assert router.choose(PROMPT) is None
    assert router.choose(PROMPT, session="s") is None
    with pytest.raises(InvalidRequest):
        router.choose(PROMPT, rank=0)


# Prefixes.


def test_choose_known_prefix_returns_its_engine():
    router = router_of(8)
    rng = random.Random(3)
    homes = {}
    for _ in range(8):
        prompt = fresh_prompt(rng, 40)
        homes[tuple(prompt)], _ = send(router, prompt)
    for prompt, home in homes.items():
        longer = [*prompt, *fresh_prompt(rng, 20)]
        assert send(router, longer)[0] == home


def test_choose_longest_prefix_wins():
    router = router_of(2)
    rng = random.Random(3)
    system = fresh_prompt(rng, 20)
    chat = [*system, *fresh_prompt(rng, 20)]
    send(router, [*system, 1], rank=0)
    send(router, chat, rank=1)
    assert send(router, [*chat, 1])[0] == 1


def test_choose_other_cache_salt_matches_no_prefix():
    router = router_of(2)
    send(router, PROMPT, rank=0, cache_salt="a")
    for _ in range(2):
        send(router, [9], rank=0)
    assert send(router, PROMPT, cache_salt="a")[0] == 0
    assert send(router, PROMPT, cache_salt="b")[0] == 1


def test_choose_overloaded_prefix_holder_is_avoided():
    router = router_of(2)
    send(router, PROMPT, rank=0)
    router.record_stats(stats(0, 3))  # ours and two of others
    assert send(router, PROMPT)[0] == 0
    assert router.num_requests(engine(0)) == 4
    assert send(router, PROMPT)[0] == 1
    router = router_of(2)
    send(router, PROMPT, rank=0)
    router.record_stats(stats(1, 20))
    router.record_stats(stats(0, 29))
    assert send(router, PROMPT)[0] == 0
    router.record_stats(stats(0, 40))
    assert send(router, PROMPT)[0] == 1


def test_choose_without_prefix_matching_balances_load():
    router = router_of(2, match_prefixes=False)
    assert sorted(send(router, PROMPT)[0] for _ in range(4)) == [0, 0, 1, 1]


def test_remove_engine_forgets_its_prefixes():
    router = router_of(2)
    send(router, PROMPT, rank=0)
    router.remove_engine(engine(0), cause="killed", will_restart=True)
    router.add_engine(engine(0, 1), INFO)
    send(router, [1], rank=0)
    assert send(router, PROMPT)[0] == 1


def test_record_started_missing_blocks_are_forgotten():
    router = router_of(2)
    _, first = send(router, PROMPT, rank=0)
    router.record_started(engine(0), first, 0)
    _, other = send(router, [*range(100, 130)], rank=0)
    router.record_started(engine(0), other, 0)
    _, again = send(router, [*range(100, 130)], rank=0)
    router.record_started(engine(0), again, 4)  # of 28: it has evicted the rest, and PROMPT, which is older
    router.record_finished(engine(0), 3)
    send(router, [1], rank=0)
    assert send(router, PROMPT)[0] == 1
    router.record_started(engine(7), again, None)  # an engine that has left is ignored


# Load.


def test_num_requests_adds_reported_load_of_other_clients():
    router = router_of(2)
    sendings = [send(router, PROMPT, rank=0) for _ in range(3)]
    assert (router.num_requests(engine(0)), router.num_requests(engine(1))) == (3, 0)
    router.record_stats(stats(0, 4, num_waiting=6))
    assert router.num_requests(engine(0)) == 10
    for _ in sendings:
        router.record_finished(engine(0))
    assert router.num_requests(engine(0)) == 7
    router.record_stats(stats(0, 0))
    assert router.num_requests(engine(0)) == 0
    router.record_stats(stats(9, 5))  # of an engine that has not joined
    assert 9 not in {member.rank for member in router.known_engines.stats}
    router.record_finished(engine(9))


def test_choose_equal_loads_prefers_emptier_cache():
    router = router_of(2)
    router.record_stats(stats(0, 0, num_free=100))
    router.record_stats(stats(1, 0, num_free=900))
    assert send(router, PROMPT)[0] == 1


@settings(max_examples=60, deadline=None)
@given(loads=st.lists(st.integers(0, 30), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_choose_never_returns_most_loaded_engine(loads, seed):
    router = router_of(len(loads), seed=seed)
    for rank, load in enumerate(loads):
        router.record_stats(stats(rank, load))
    rank, _ = send(router, fresh_prompt(random.Random(seed)))
    assert loads[rank] < max(loads) or loads.count(max(loads)) > 1


def fill(num_engines, num_each, *, num_clients, system):
    """Send requests of several clients, which see each other only in the engines' reports, and return the number of
    requests on each engine."""
    rng = random.Random(7)
    routers = [router_of(num_engines, seed=seed) for seed in range(num_clients)]
    filled = Counter()
    for number in range(num_engines * num_each):
        if number % 200 == 0:
            for router in routers:
                for rank in range(num_engines):
                    router.record_stats(stats(rank, filled[rank]))
        rank, _ = send(routers[number % num_clients], [*system, *fresh_prompt(rng)])
        filled[rank] += 1
    return [filled[rank] for rank in range(num_engines)]


@pytest.mark.parametrize(
    "num_clients", [pytest.param(1, marks=pytest.mark.grid), 4, pytest.param(8, marks=pytest.mark.grid)]
)
def test_choose_many_clients_fill_64_engines_evenly(num_clients):
    filled = fill(64, 100, num_clients=num_clients, system=[])
    assert min(filled) >= 90 and max(filled) <= 110


@pytest.mark.parametrize(
    "num_clients", [pytest.param(1, marks=pytest.mark.grid), 4, pytest.param(8, marks=pytest.mark.grid)]
)
def test_choose_common_prefix_leaves_no_engine_idle(num_clients):
    filled = fill(64, 100, num_clients=num_clients, system=PROMPT)
    assert max(filled) <= 1.5 * min(filled)


@settings(max_examples=60, deadline=None)
@given(
    num_engines=st.integers(1, 5),
    events=st.lists(st.tuples(st.sampled_from(["send", "end", "leave", "join", "report"]), st.integers(0, 4))),
    seed=st.integers(0, 99),
)
def test_num_requests_any_order_of_events_is_exact(num_engines, events, seed):
    router = router_of(num_engines, seed=seed)
    here = dict.fromkeys(range(num_engines), 0)
    incarnations = Counter()
    running = []
    for event, number in events:
        match event:
            case "send" if here:
                decision = router.choose([number % 3] * 20)
                match = router.record_sent(decision)
                router.record_started(decision.engine, match, 4 * number)
                running.append(decision.engine)
            case "end" if running:
                router.record_finished(running.pop(number % len(running)))
            case "leave" if number in here:
                gone = engine(number, here.pop(number))
                router.remove_engine(gone, cause="killed", will_restart=True)
                running = [one for one in running if one != gone]
            case "join" if number not in here and number < num_engines:
                incarnations[number] += 1
                here[number] = incarnations[number]
                router.add_engine(engine(number, here[number]), INFO)
            case "report" if here.get(number) == 0:
                router.record_stats(stats(number, running.count(engine(number))))
        assert (router.choose([1] * 20) is None) == (not here)
        for rank, incarnation in here.items():
            assert router.num_requests(engine(rank, incarnation)) == running.count(engine(rank, incarnation))
        assert router.known_engines.ranks == list(range(num_engines))


def test_choose_after_a_weight_update_expects_no_older_blocks():
    """Engines that report a new update do not have what older weights computed; what they compute since is expected."""
    router = router_of(2)
    rank, match = send(router, PROMPT)
    router.record_started(engine(rank), match, 0)
    assert send(router, PROMPT)[1].expected
    for one in range(2):
        router.record_stats(msgspec.structs.replace(stats(one, 0), update=1))
    rank, match = send(router, PROMPT)
    assert not match.expected
    router.record_started(engine(rank), match, 0)
    assert send(router, PROMPT)[1].expected
