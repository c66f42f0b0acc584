"""Load on a server while its processes die, and a report of what the clients saw of it: nothing but a pause.

python scripts/chaos.py [--requests 1000] [--every 3] [--backend ray] [--ray-cluster own] [--hosts 3]
    [--victims engine,raylet] [--expert-parallel] [--routed-experts] [-- options]

The load is sent twice to the same server: first undisturbed, then while random engines, workers and API servers are
killed (SIGKILL) or stopped (SIGSTOP) every few seconds; with `--hosts`, which needs root, each engine is on a host of
its own, hosts die, and links to them are cut. `--victims` may name `raylet` and `gcs`, Ray's node manager and its
control store: those of a cluster that this program keeps, and whose nodes it starts again as an operator does, or,
with `--ray-cluster own`, of the cluster that the server has started for itself. Every answer must be the same both
times. A request whose own API server dies loses its connection; it is sent again here, as any client has to, and
counted apart.

Exits with 0 if no request failed, no answer differs, all engines are back, and nothing is left at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import chaos_hosts
import chaos_ray
from chaos_blows import Blow, Blows
from chaos_hosts import Cluster
from chaos_leaks import Leaks
from chaos_load import Job, Outcome, differences, make_jobs, run_load
from chaos_server import CONTROL_STORE, RAYLET, ChaosFailed, Member, Server, end_properly_when_told

START_SECONDS = 25
"""What an engine gets to start: one that is stopped before it could say anything is missed after that."""

WHOLE_SECONDS = 150.0
"""After the last blow, every engine answers again."""

SHOWN = 10
RAY_START_SECONDS = 90
"""The same where Ray itself may have to come back first."""

VICTIMS = {
    "engine": "engine",
    "api-server": "API server",
    "worker": "worker",
    "driver": "driver",
    "host": "host",
    "raylet": RAYLET,
    "gcs": CONTROL_STORE,
}
"""Names for the command line of what may be killed."""

USUAL_VICTIMS = ["engine", "api-server", "worker", "driver", "host"]

HIT_FACTOR, HIT_SECONDS = 5.0, 0.02
"""A stream was hit by a death if its pause around it is so many times its usual one, at least so long, and mostly after
it: what had paused before was waiting for something else."""

MANY = "1000000"
"""Budgets of restarts are for what goes on dying by itself: here somebody kills."""


@dataclass
class Report:
    requests: int = 0
    tokens: int = 0
    seconds: float = 0.0
    blows: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    resent: int = 0
    """Times that a request was sent again because its own API server had died."""
    failures: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    next_token: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds from what was done to an engine or its host to the next token of a stream that it had."""
    leaks: dict[str, list[str]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)
    """What else must not be."""

    @property
    def is_good(self) -> bool:
        return not (self.failures or self.mismatches or self.trouble or any(self.leaks.values()))


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
    end_properly_when_told()
    with tempfile.TemporaryDirectory(prefix="chaos-") as directory, ExitStack() as stack:
        root = Path(directory)
        report = _torment(options, root, stack)
    print(json.dumps(asdict(report) | {"ok": report.is_good}) if options.json else _show(report))
    return 0 if report.is_good else 1


def _torment(options: argparse.Namespace, root: Path, stack: ExitStack) -> Report:
    report = Report(requests=options.requests)
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
        server.wait_until_whole(num_engines=options.data_parallel_size, seconds=WHOLE_SECONDS)
        _load(options, server, surroundings, report)
        server.wait_until_whole(num_engines=options.data_parallel_size, seconds=WHOLE_SECONDS)
        report.restarts = _restarts(server.members() + surroundings.labelled(server))
        if (code := server.stop()) != 0:
            report.trouble.append(f"told to stop, the server ended with exit code {code}")
        report.leaks = leaks.find(server)
    except ChaosFailed as error:
        report.trouble.append(str(error))
    return report


@dataclass(frozen=True)
class Surroundings:
    """Where the server runs, and what belongs to it that is no descendant of it."""

    arguments: list[str] = field(default_factory=list)
    enter: Sequence[str] = ()
    temporary: Path | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    members: Callable[[Server], list[Member]] = lambda server: []
    labelled: Callable[[Server], list[Member]] = lambda server: []
    """The same with their identities."""
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


def _load(options: argparse.Namespace, server: Server, surroundings: Surroundings, report: Report) -> None:
    """The load undisturbed, the load with blows, and the difference."""
    jobs = make_jobs(options.requests, options.seed, routed_experts=options.routed_experts)
    expected = asyncio.run(
        run_load(server.url, jobs, concurrency=options.concurrency, api_server_was_hit=lambda since: False)
    )
    if failures := _failures(expected):
        raise ChaosFailed(f"without any blow requests failed: {failures[:SHOWN]}")
    choices = [choice for one in expected if one.answer is not None for choice in one.answer.choices.values()]
    if options.routed_experts and not all(choice.rows for choice in choices):
        raise ChaosFailed("not every answer has routed experts, though all asked for them")
    blows = Blows(
        lambda: server.members() + surroundings.members(server),
        every=options.every,
        settled=options.settled,
        missed_after=options.heartbeat_timeout,
        rng=random.Random(options.seed),
        victims=[VICTIMS[name] for name in options.victims],
        hosts=surroundings.hosts,
    )
    began = time.monotonic()
    got = asyncio.run(_disturbed(server, jobs, blows, options.concurrency))
    report.seconds = round(time.monotonic() - began, 1)
    report.blows = dict(Counter(blow.label for blow in blows.struck))
    report.resent = sum(outcome.num_resent for outcome in got)
    report.failures = _failures(got)
    report.tokens = sum(outcome.answer.num_tokens for outcome in got if outcome.answer is not None)
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        if one.answer is not None and other.answer is not None:
            found = differences(one.answer, other.answer)
            report.mismatches += [f"request {number} ({one.job.kind}): {what}" for what in found]
    ends = [blow for blow in blows.struck if blow.ends_engine]
    for label in sorted({blow.label for blow in ends}):
        report.next_token[label] = _percentiles(got, [blow for blow in ends if blow.label == label])
    if surroundings.hosts is not None:
        report.trouble += surroundings.hosts.trouble
    server.check()


async def _disturbed(server: Server, jobs: Sequence[Job], blows: Blows, concurrency: int) -> list[Outcome]:
    striking = asyncio.create_task(blows.run())
    try:
        return await run_load(server.url, jobs, concurrency=concurrency, api_server_was_hit=blows.hit_api_server)
    finally:
        striking.cancel()
        with suppress(asyncio.CancelledError):
            await striking


def _failures(outcomes: Sequence[Outcome]) -> list[str]:
    return [
        f"request {number} ({outcome.job.kind}): {outcome.failure}"
        for number, outcome in enumerate(outcomes)
        if outcome.failure is not None
    ]


def _percentiles(outcomes: Sequence[Outcome], blows: Sequence[Blow]) -> dict[str, float]:
    """Of the times from these blows to the next tokens of the streams that they hit, in milliseconds."""
    waits = sorted(
        wait
        for outcome in outcomes
        if outcome.answer is not None
        for choice in outcome.answer.choices.values()
        for blow in blows
        if (wait := _wait(choice.arrivals, blow.when)) is not None
    )
    if not waits:
        return {"streams": 0}
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    found = {name: round(1000 * waits[min(int(share * len(waits)), len(waits) - 1)], 1) for name, share in at.items()}
    return {"streams": len(waits), **found}


def _wait(arrivals: Sequence[float], when: float) -> float | None:
    """How long a stream waited for its next token at that time; None if it was not running, or not hit.

    Whose stream it was, a client does not know: what went on as usual was another engine's.
    """
    after = bisect_right(arrivals, when)
    if not 0 < after < len(arrivals):
        return None
    usual = statistics.median(b - a for a, b in itertools.pairwise(arrivals))
    pause = arrivals[after] - arrivals[after - 1]
    wait = arrivals[after] - when
    return wait if pause > max(HIT_FACTOR * usual, HIT_SECONDS) and wait > pause / 2 else None


def _restarts(members: Sequence[Member]) -> int:
    newest = {m.slot: m.incarnation for m in sorted(members, key=lambda m: m.incarnation)}
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
        "--dtype": "float32",  # the answers are to be equal, not only valid
        "--num-threads": 1,
    }
    if options.expert_parallel:  # then the death of one engine is a pause for the streams of all
        arguments.append("--enable-expert-parallel")
    if options.routed_experts:
        arguments.append("--enable-return-routed-experts")
    return arguments + [str(word) for pair in given.items() for word in pair]


def _show(report: Report) -> str:
    lines = [
        f"requests                {report.requests} ({report.tokens} tokens in {report.seconds} s)",
        f"blows                   {', '.join(f'{n} x {what}' for what, n in sorted(report.blows.items())) or 'none'}",
        f"restarts                {report.restarts}",
        f"sent again by clients   {report.resent}, whose own API server had died",
        f"failures                {len(report.failures)}",
        f"mismatches              {len(report.mismatches)}",
        *(f"next token after {label}, ms: {_pairs(values)}" for label, values in report.next_token.items()),
        *(f"left behind: {what:<19}{len(left)} {', '.join(left)}" for what, left in report.leaks.items()),
    ]
    for title, found in (("failure", report.failures), ("mismatch", report.mismatches), ("trouble", report.trouble)):
        lines += [f"{title}: {what}" for what in found[:SHOWN]]
    return "\n".join([*lines, "good" if report.is_good else "NOT GOOD"])


def _pairs(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in values.items())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--concurrency", type=int, default=12, help="requests in flight")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between two blows, on the average")
    parser.add_argument(
        "--settled", type=float, default=12.0, help="seconds that a process has been there before most blows hit it"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the blows")
    parser.add_argument("--backend", choices=["processes", "ray"], default="processes", help="what an engine is")
    parser.add_argument(
        "--ray-cluster", choices=["kept", "own"], default="kept", help="kept by this program, or the server's own"
    )
    parser.add_argument(
        "--victims",
        type=lambda text: text.split(","),
        default=USUAL_VICTIMS,
        help=f"what is killed: of {','.join(VICTIMS)}; all but raylet and gcs without it",
    )
    parser.add_argument("--hosts", type=int, default=0, help="so many simulated hosts for engines; more than engines")
    parser.add_argument("--data-parallel-size", type=int, default=2, help="engines")
    parser.add_argument("--expert-parallel", action="store_true", help="the engines share the experts of the model")
    parser.add_argument(
        "--routed-experts", action="store_true", help="all requests ask which experts computed their tokens"
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
