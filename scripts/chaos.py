"""Load on a server while its processes are killed, and a report of what its clients noticed: nothing but a pause.

python scripts/chaos.py [--requests 1000] [--rounds 2] [--every 3] [--backend ray] [--ray-cluster own] [--hosts 3]
    [--victims engine,raylet] [--expert-parallel] [--routed-experts] [--steer] [--scale] [--weight-updates 5]
    [-- options]

The load is sent twice to the same server, or more often with `--rounds`: first without faults, then while random
engines, workers and API servers are killed (SIGKILL) or stopped (SIGSTOP) every few seconds; with `--hosts`, which
needs root, each engine is on a host of its own, hosts are killed, and links to them are cut. `--victims` may name
`raylet` and `gcs`, Ray's node manager and its control store: those of a cluster that this program maintains, restarting
its nodes as an operator does, or, with `--ray-cluster own`, those of the cluster that the server has started for
itself. Every answer must be the same each time. A request whose own API server exits loses its connection; it is sent
again here, as any client has to, and counted separately. With `--steer`, pauses, sleeps and weight updates go on
meanwhile; with `--scale`, engines and API servers are added, removed and restarted.

With `--weight-updates` a trainer pushes other weights every few seconds meanwhile, by shared memory and also in pauses,
and processes are killed in the middle of its calls. The load without faults is sent once with each variant of the
weights. The tokens that an answer has from the first version of its weights must be those of that version alone.

The exit code is 0 if no request failed, no answer differs, all engines are back, and nothing is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import chaos_hosts
import chaos_ray
from chaos_faults import FaultInjector
from chaos_hosts import Cluster
from chaos_leaks import Leaks
from chaos_load import (
    ANSWER_FORMATS,
    ChaosOutcome,
    ChaosRequest,
    find_broken_constraints,
    find_differences,
    make_requests,
    run_load,
)
from chaos_report import SHOWN, ChaosReport, show_report, wait_percentiles
from chaos_scaling import Scaling
from chaos_server import CONTROL_STORE, FORK_SERVER, RAYLET, ChaosFailed, Server, Target, exit_on_sigterm
from chaos_steering import Steering
from chaos_trainer import TRAINER_TIMEOUT_SECONDS, Trainer
from chaos_weights import Labels, find_wrong_versions, make_variants

START_SECONDS = 25
"""Time that an engine has to start: one that is stopped before its first message is missed after it."""

ALL_ENGINES_SECONDS = 150.0
"""Time within which every engine answers again after the last fault."""

LAST_REQUESTS = 20
"""Requests that are sent after the last weight update."""

RAY_START_SECONDS = 90
"""Start time of an engine if Ray itself may have to restart first."""

VICTIMS = {
    "engine": "engine",
    "api-server": "API server",
    "worker": "worker",
    "driver": "driver",
    "fork-server": FORK_SERVER,
    "host": "host",
    "raylet": RAYLET,
    "gcs": CONTROL_STORE,
}
"""Kinds of processes that may be killed, by their names on the command line."""

USUAL_VICTIMS = ["engine", "api-server", "worker", "driver", "fork-server", "host"]

MANY = "1000000"
"""Restart budgets are for processes that fail by themselves; here they are killed."""


def main() -> int:
    parser = _parser()
    options = parser.parse_args()
    if options.hosts and options.hosts <= options.data_parallel_size:
        parser.error(
            f"--hosts {options.hosts}: one that dies leaves too few for {options.data_parallel_size} engines; give more"
        )
    if unknown := [name for name in options.victims if name not in VICTIMS]:
        parser.error(f"--victims: {unknown[0]!r} is none of {', '.join(VICTIMS)}")
    if {"raylet", "gcs"} & set(options.victims) and (options.backend != "ray" or options.hosts):
        parser.error("--victims: raylet and gcs need --backend ray without --hosts")
    if options.hosts and (reason := chaos_hosts.why_impossible()):
        parser.error(f"--hosts {options.hosts}: {reason}")
    if options.steer and options.weight_updates:
        parser.error("--steer, --weight-updates: both update the weights; give one of them")
    if options.scale and (options.steer or options.weight_updates):
        parser.error("--scale: not with --steer or --weight-updates, which forbid it at times")
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, ExitStack() as stack:
        root = Path(directory)
        report = _run_chaos(options, root, stack)
    print(json.dumps(asdict(report) | {"ok": report.is_good}) if options.json else show_report(report))
    return 0 if report.is_good else 1


def _run_chaos(options: argparse.Namespace, root: Path, stack: ExitStack) -> ChaosReport:
    report = ChaosReport(requests=options.requests * options.rounds)
    surroundings = _surroundings(options, root, stack)
    leaks = Leaks(surroundings.left)
    server = Server(
        _arguments(options, root) + surroundings.arguments + options.server,
        root,
        log=options.log or root / "log",
        enter=surroundings.enter,
        temporary=surroundings.temporary,
        env=surroundings.env,
    )
    stack.callback(server.kill)
    try:
        server.wait_until_serving()
        server.wait_until_all_engines_answer(num_engines=options.data_parallel_size, seconds=ALL_ENGINES_SECONDS)
        _load(options, server, surroundings, report)
        server.wait_until_all_engines_answer(num_engines=options.data_parallel_size, seconds=ALL_ENGINES_SECONDS)
        report.restarts = _restarts(server.members() + surroundings.labelled(server))
        if (code := server.stop()) != 0:
            report.trouble.append(f"told to stop, the server exited with code {code}")
        report.leaks = leaks.find(server)
    except ChaosFailed as error:
        report.trouble.append(str(error))
    return report


@dataclass(frozen=True)
class Surroundings:
    """Place of the server, and the processes that belong to it without being its descendants."""

    arguments: list[str] = field(default_factory=list)
    enter: Sequence[str] = ()
    temporary: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    members: Callable[[Server], list[Target]] = lambda server: []
    labelled: Callable[[Server], list[Target]] = lambda server: []
    """Returns the same processes with their labels."""
    left: Callable[[], list[str]] = list
    hosts: Cluster | None = None


def _surroundings(options: argparse.Namespace, root: Path, stack: ExitStack) -> Surroundings:
    if options.hosts:
        hosts = stack.enter_context(
            chaos_hosts.cluster(root, num_hosts=options.hosts, missed_after=options.heartbeat_timeout)
        )
        return Surroundings(
            hosts.arguments(),
            enter=hosts.enter,
            temporary=hosts.temporary,
            env=hosts.env,
            members=lambda server: hosts.members(),
            labelled=lambda server: hosts.labelled(),
            left=hosts.left,
            hosts=hosts,
        )
    if options.backend == "ray":
        if options.ray_cluster == "own":
            chaos_ray.prepare(root)
            return Surroundings(
                ["--ray-address", "local"],
                members=lambda server: chaos_ray.members_with(server.own_mark),
                labelled=Server.engines,
            )
        ray = stack.enter_context(chaos_ray.cluster(root, num_engines=options.data_parallel_size))
        return Surroundings(
            ["--ray-address", ray.address],
            members=lambda server: ray.members(),
            labelled=Server.engines,
            left=ray.left,
        )
    return Surroundings()


def _load(options: argparse.Namespace, server: Server, surroundings: Surroundings, report: ChaosReport) -> None:
    """Send the load without faults, then with faults, and compare the answers."""
    requests = make_requests(options.requests, options.seed, routed_experts=options.routed_experts)
    injector = FaultInjector(
        lambda: server.members() + surroundings.members(server),
        every=options.every,
        settled=options.settled,
        missed_after=options.heartbeat_timeout,
        rng=random.Random(options.seed),
        victims=[VICTIMS[name] for name in options.victims],
        hosts=surroundings.hosts,
        most=options.faults,
    )
    load = _load_with_updates if options.weight_updates else _load_of_one_version
    began, got = asyncio.run(load(options, server, requests, injector, report))
    report.seconds = round(time.monotonic() - began, 1)
    report.blows = dict(Counter(fault.label for fault in injector.faults))
    report.resent = sum(outcome.num_resent for outcome in got)
    report.failures = _failures(got)
    report.mismatches += [
        f"request {number} ({outcome.request.kind}): {what}"
        for number, outcome in enumerate(got)
        if outcome.answer is not None
        for what in find_broken_constraints(outcome.request, outcome.answer)
    ]
    report.tokens = sum(outcome.answer.num_tokens for outcome in got if outcome.answer is not None)
    ends = [fault for fault in injector.faults if fault.ends_engine]
    for label in sorted({fault.label for fault in ends}):
        report.next_token[label] = wait_percentiles(got, [fault for fault in ends if fault.label == label])
    if surroundings.hosts is not None:
        report.trouble += surroundings.hosts.trouble
    server.check()


async def _load_of_one_version(
    options: argparse.Namespace,
    server: Server,
    requests: Sequence[ChaosRequest],
    injector: FaultInjector,
    report: ChaosReport,
) -> tuple[float, list[ChaosOutcome]]:
    """Return the time at which faults began, and the outcomes with faults."""
    expected = await _run_load_without_faults(server, requests, options)
    choices = [choice for one in expected if one.answer is not None for choice in one.answer.choices.values()]
    if options.routed_experts and not all(choice.rows for choice in choices):
        raise ChaosFailed("not every answer has routed experts, though all asked for them")
    steering: Steering | Scaling | None = None
    if options.steer:
        steering = Steering(server.url, rng=random.Random(options.seed))
    elif options.scale:
        steering = Scaling(
            server.url,
            num_engines=options.data_parallel_size,
            num_api_servers=options.api_server_count,
            rng=random.Random(options.seed),
        )
    began = time.monotonic()
    got = await _run_load_with_faults(server, [*requests] * options.rounds, injector, steering, options.concurrency)
    if steering is not None:
        report.control_calls = dict(steering.calls)
        report.trouble += steering.trouble
    report.mismatches = _compare(expected * options.rounds, got)
    return began, got


async def _load_with_updates(
    options: argparse.Namespace,
    server: Server,
    requests: Sequence[ChaosRequest],
    injector: FaultInjector,
    report: ChaosReport,
) -> tuple[float, list[ChaosOutcome]]:
    """The same as `_load_of_one_version`, while a trainer pushes weights."""
    variants, labels = make_variants(options.model), Labels()
    async with Trainer(
        server.url,
        variants,
        labels,
        every=options.weight_updates,
        strike_every=options.every,
        rng=random.Random(options.seed),
        strike=injector.strike,
    ) as trainer:
        expected = [await _run_load_without_faults(server, requests, options)]
        for number in range(1, len(variants)):
            assert await trainer.push() == number
            expected.append(await _run_load_without_faults(server, requests, options))
        began = time.monotonic()
        training = asyncio.create_task(trainer.run())
        got = await _run_load_with_faults(server, [*requests] * options.rounds, injector, None, options.concurrency)
        trainer.stop()
        await training
        variant = await trainer.push()  # complete, so that every engine that lacks weights has them again
        await trainer.wait_until_ready(num_engines=options.data_parallel_size, seconds=ALL_ENGINES_SECONDS)
        last = await _run_load_without_faults(server, requests[:LAST_REQUESTS], options)
        report.mismatches = _compare(expected[variant][:LAST_REQUESTS], last)
        for number, outcome in enumerate(got):
            answers = [outcomes[number % len(requests)].answer for outcomes in expected]
            if outcome.answer is not None:
                oldest = trainer.label_at(outcome.began)
                found = find_wrong_versions(outcome.answer, [one for one in answers if one], labels, oldest)
                report.mismatches += [f"request {number} ({outcome.request.kind}): {what}" for what in found]
                report.answers_of_several_versions += any(
                    len(choice.weight_versions) > 1 for choice in outcome.answer.choices.values()
                )
        report.trainer = trainer.report
        report.trouble += trainer.trouble
    return began, got


def _compare(expected: Sequence[ChaosOutcome], got: Sequence[ChaosOutcome]) -> list[str]:
    """Describe the differences between answers to the same requests."""
    return [
        f"request {number} ({one.request.kind}): {what}"
        for number, (one, other) in enumerate(zip(expected, got, strict=True))
        if one.answer is not None and other.answer is not None
        for what in find_differences(one.answer, other.answer)
    ]


async def _run_load_without_faults(
    server: Server, requests: Sequence[ChaosRequest], options: argparse.Namespace
) -> list[ChaosOutcome]:
    outcomes = await run_load(
        server.url, requests, concurrency=options.concurrency, may_have_hit_api_server=lambda since: False
    )
    if failures := _failures(outcomes):
        raise ChaosFailed(f"without any fault requests failed: {failures[:SHOWN]}")
    return outcomes


async def _run_load_with_faults(
    server: Server,
    requests: Sequence[ChaosRequest],
    injector: FaultInjector,
    steering: Steering | Scaling | None,
    concurrency: int,
) -> list[ChaosOutcome]:
    disturbing = [asyncio.create_task(injector.run())]
    if steering is not None:
        disturbing.append(asyncio.create_task(steering.run()))
    try:
        outcomes = await run_load(
            server.url, requests, concurrency=concurrency, may_have_hit_api_server=injector.may_have_hit_api_server
        )
    finally:
        for task in disturbing:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
    if steering is not None:
        await steering.finish()
    return outcomes


def _failures(outcomes: Sequence[ChaosOutcome]) -> list[str]:
    return [
        f"request {number} ({outcome.request.kind}): {outcome.failure}"
        for number, outcome in enumerate(outcomes)
        if outcome.failure is not None
    ]


def _restarts(members: Sequence[Target]) -> int:
    newest = {m.place: m.incarnation for m in sorted(members, key=lambda m: m.incarnation)}
    return sum(newest[m] for m in newest if "/" not in m)


def _arguments(options: argparse.Namespace, root: Path) -> list[str]:
    arguments = [] if options.model is None else [options.model]
    if options.hosts and options.model is not None:  # where all hosts see it
        arguments = [str(shutil.copytree(options.model, root / "model"))]
    given = {
        "--data-parallel-size": options.data_parallel_size,
        "--data-parallel-backend": "ray" if options.hosts else options.backend,
        "--api-server-count": options.api_server_count,
        "--max-request-restarts": MANY,
        "--max-engine-restarts": MANY,
        "--heartbeat-timeout": options.heartbeat_timeout,
        "--startup-timeout": RAY_START_SECONDS if {"raylet", "gcs"} & set(options.victims) else START_SECONDS,
        "--dtype": "float32",  # answers must be equal, not only valid
        **ANSWER_FORMATS,
        "--num-threads": 1,
    }
    if options.expert_parallel:  # then the exit of one engine pauses the streams of all
        arguments.append("--enable-expert-parallel")
        if options.scale:  # else the last bits of sums depend on the number of engines
            arguments += ["--expert-dispatch", "all-to-all"]
    if options.scale:  # an API server that goes cuts its streams after this time, and they may wait long for an engine
        arguments += ["--shutdown-timeout", str(ALL_ENGINES_SECONDS)]
    if options.routed_experts:
        arguments.append("--enable-return-routed-experts")
    if options.weight_updates:
        arguments += ["--weight-update-timeout", str(TRAINER_TIMEOUT_SECONDS)]
    return arguments + [str(word) for pair in given.items() for word in pair]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1, help="times that the load is sent while faults are injected")
    parser.add_argument("--concurrency", type=int, default=12, help="requests in flight")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two faults, on the average")
    parser.add_argument(
        "--settled", type=float, default=12.0, help="seconds that a process has been there before most faults hit it"
    )
    parser.add_argument("--faults", type=int, default=math.inf, help="end them after this many; default: with the load")
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults")
    parser.add_argument(
        "--backend", choices=["processes", "ray"], default="processes", help="kind of process of an engine"
    )
    parser.add_argument(
        "--ray-cluster", choices=["kept", "own"], default="kept", help="kept by this program, or the server's own"
    )
    parser.add_argument(
        "--victims",
        type=lambda text: text.split(","),
        default=USUAL_VICTIMS,
        help=f"what is killed: of {','.join(VICTIMS)}; all but raylet and gcs without it",
    )
    parser.add_argument("--hosts", type=int, default=0, help="number of simulated hosts for engines; more than engines")
    parser.add_argument("--data-parallel-size", type=int, default=2, help="engines")
    parser.add_argument("--expert-parallel", action="store_true", help="the engines share the experts of the model")
    parser.add_argument(
        "--routed-experts", action="store_true", help="all requests ask which experts computed their tokens"
    )
    parser.add_argument("--steer", action="store_true", help="pause, put to sleep and update the weights meanwhile")
    parser.add_argument("--scale", action="store_true", help="add, remove and restart engines and servers meanwhile")
    parser.add_argument(
        "--weight-updates", type=float, default=0.0, metavar="SECONDS", help="push other weights about that often"
    )
    parser.add_argument("--api-server-count", type=int, default=2)
    parser.add_argument(
        "--heartbeat-timeout", type=float, default=3.0, help="seconds until a stopped process is missed"
    )
    parser.add_argument("--model", help="directory of a checkpoint; without it the embedded demo model")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("server", nargs="*", help="options of `eagleray serve`, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
