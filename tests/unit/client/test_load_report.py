from __future__ import annotations

import asyncio

from client_fakes import CLIENT, INFO, FakeEngine, asynchronous, attached

from eagleray.client import client as client_module
from eagleray.client.load_report import LoadReporter
from eagleray.client.preprocess import Prompt
from eagleray.messages.outputs import EngineStats
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.scaling import EngineLoadReport, LoadReport

PROMPT = Prompt(token_ids=[5, 6, 7])
PARAMS = SamplingParams(max_tokens=5)


@asynchronous
async def test_report_first_tokens_are_late_after_the_target_and_count_once():
    async with attached() as setup:
        in_flight = setup.client._in_flight
        reporter = LoadReporter(CLIENT, in_flight=in_flight, target_ttft=2.0)
        for _ in range(4):
            setup.client.generate(PROMPT, PARAMS)
        requests = list(in_flight._requests.values())
        requests[1].arrived_at -= 3.0
        requests[2].arrived_at -= 3.0
        await setup.engine.send((0, {"token_ids": [7]}), (1, {"token_ids": [7]}))
        assert reporter.report([]) == LoadReport(
            client=CLIENT, engines=[], num_first_tokens=2, num_late=1, num_overdue=1
        )
        assert reporter.report([]) == LoadReport(client=CLIENT, engines=[], num_overdue=1)
        reporter.on_engine_joined()
        requests[3].arrived_at -= 3.0
        await setup.engine.send((2, {"token_ids": [7]}))
        assert reporter.report([]) == LoadReport(client=CLIENT, engines=[]), "these came before the engine"


@asynchronous
async def test_report_without_a_target_nothing_is_late_and_requests_may_wait_for_an_engine():
    async with attached() as setup:
        await setup.engine.leave()
        in_flight = setup.client._in_flight
        reporter = LoadReporter(CLIENT, in_flight=in_flight, target_ttft=None)
        setup.client.generate(PROMPT, SamplingParams(max_tokens=5, n=3))
        next(iter(in_flight._requests.values())).arrived_at -= 1000.0
        assert reporter.report([]) == LoadReport(client=CLIENT, engines=[], num_unassigned=3)


def test_client_reports_the_load_of_its_engines_to_the_supervisor(monkeypatch):
    @asynchronous
    async def scenario():
        async with attached(reports_load=True) as setup:
            await FakeEngine(setup, 1).join()
            counts = {"num_steps": 1, "num_preemptions": 0, "num_prefix_queries": 0, "num_prefix_hits": 0}
            stats = EngineStats(
                engine=setup.engine.id,
                num_running=3,
                num_waiting=9,
                num_deferred=2,
                num_kv_blocks=INFO.num_kv_blocks,
                num_free_kv_blocks=25,
                num_prompt_tokens=50,
                num_generation_tokens=60,
                **counts,
            )
            await setup.deliver(stats)
            await asyncio.sleep(0.05)
            load = EngineLoadReport(
                engine=setup.engine.id,
                num_running=3,
                num_waiting=7,
                cache_usage=0.75,
                num_prompt_tokens=50,
                num_generation_tokens=60,
            )
            assert LoadReport(client=CLIENT, engines=[load]) in setup.network.mail["supervisor"]
        async with attached() as setup:
            await asyncio.sleep(0.05)
            assert not any(isinstance(message, LoadReport) for message in setup.network.mail["supervisor"])

    monkeypatch.setattr(client_module, "CONNECTION_POLL_SECONDS", 0.01)
    scenario()
