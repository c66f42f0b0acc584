"""Mixed load on a server for a long time, while its processes are killed, and a check of growth and leaks.

python scripts/soak.py [--minutes 15] [--seed 0] [--every 10] [--backend ray] [-- options of serve]

The soak runs in rounds of a minute: streams, whole answers, chats, log-probabilities and clients that disconnect, while
processes are killed or stopped; then the load pauses until all engines answer, and memory, descriptors, threads, shared
memory, files of the runtime directory, and Ray's actors, groups and objects are counted. The same requests are sent in
each round and must have the same answers.

The exit code is 0 if no request failed or changed, no count grows beyond the bounds below, and nothing is left at the
end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

import chaos_ray
import httpx
from chaos_faults import FaultInjector
from chaos_leaks import Leaks, segments
from chaos_load import ANSWER_FORMATS, REGEX, ChaosOutcome, ChaosRequest, find_differences, make_requests, run_load
from chaos_server import ChaosFailed, Server, exit_on_sigterm, processes_with

ROUND_SECONDS = 45.0
"""Duration of a round's load; with the pause and the count after it, a round takes about a minute."""

SETTLE_SECONDS = 3.0
ALL_ENGINES_SECONDS = 150.0
WARM_UP_ROUNDS = 2
"""Rounds in which caches fill and allocators settle, before the first one that counts for growth."""

NUM_REQUESTS = 400
DISCONNECT_INTERVAL_SECONDS = 0.2
MEGABYTE = 2**20
SHOWN = 10


@dataclass(frozen=True)
class Bound:
    """Limit of a figure's growth: `slack` in all, or `per_minute` times the minutes, whichever is more."""

    slack: float
    per_minute: float


BOUNDS = {
    "RSS of all, MB": Bound(100, 5),
    "RSS of the supervisor, MB": Bound(16, 1),
    "descriptors": Bound(16, 0.5),
    "descriptors of the supervisor": Bound(4, 0.2),
    "threads": Bound(12, 0.3),
    "processes": Bound(2, 0),
    "shared memory": Bound(2, 0),
    "runtime files": Bound(4, 0),
    "Ray actors": Bound(0, 0),
    "Ray groups": Bound(0, 0),
    "Ray objects, MB": Bound(8, 0.5),
}
"""Bounds by the name of the figure. Replacements of killed processes are young, so the sums vary a little."""


@dataclass
class SoakReport:
    minutes: float = 0.0
    requests: int = 0
    aborted: int = 0
    resent: int = 0
    blows: int = 0
    census: list[dict[str, float]] = field(default_factory=list)
    """Figures after each round, by name; `minute` is the time."""
    runtime_files: list[str] = field(default_factory=list)
    """Files of the runtime directory at the last count."""
    growth: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    leaks: dict[str, list[str]] = field(default_factory=dict)
    trouble: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        bad = self.failures or self.mismatches or self.trouble or self.growth
        return not (bad or any(self.leaks.values()))


def main() -> int:
    options = _parser().parse_args()
    exit_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory, ExitStack() as stack:
        report = _soak(options, Path(directory), stack)
    print(json.dumps(asdict(report) | {"ok": report.is_good}) if options.json else _shown(report))
    return 0 if report.is_good else 1


def _soak(options: argparse.Namespace, root: Path, stack: ExitStack) -> SoakReport:
    report = SoakReport()
    arguments, ray = [], None
    if options.backend == "ray":
        ray = stack.enter_context(chaos_ray.cluster(root, num_engines=options.data_parallel_size))
        arguments = ["--ray-address", ray.address, "--data-parallel-backend", "ray"]
    leaks = Leaks(list if ray is None else ray.left)
    server = Server(_arguments(options) + arguments + options.server, root, log=options.log or root / "log")
    stack.callback(server.kill)
    try:
        server.wait_until_serving()
        _rounds(options, server, ray, report)
        if (code := server.stop()) != 0:
            report.trouble.append(f"told to stop, the server exited with code {code}")
        report.leaks = leaks.find(server)
    except ChaosFailed as error:
        report.trouble.append(str(error)[-3000:])
    report.growth = growth(report.census)
    if any(what.startswith("runtime files") for what in report.growth):
        report.growth.append(f"runtime files at the last count: {', '.join(report.runtime_files)}")
    return report


def _rounds(options: argparse.Namespace, server: Server, ray: chaos_ray.RayCluster | None, report: SoakReport) -> None:
    requests = make_requests(NUM_REQUESTS, options.seed)
    expected: dict[int, ChaosOutcome] = {}
    known = segments()
    began = time.monotonic()
    number = 0
    while (minute := (time.monotonic() - began) / 60) < options.minutes or number == 0:
        outcomes, num_aborted, num_faults = asyncio.run(_round(options, server, ray, requests, number))
        server.wait_until_all_engines_answer(num_engines=options.data_parallel_size, seconds=ALL_ENGINES_SECONDS)
        time.sleep(SETTLE_SECONDS)  # until stopped processes are replaced and their memory is returned
        _compare(outcomes, expected, report)
        report.requests += len(outcomes)
        report.aborted += num_aborted
        report.blows += num_faults
        report.resent += sum(outcome.num_resent for outcome in outcomes.values())
        minute = (time.monotonic() - began) / 60
        report.census.append({"minute": round(minute, 2), **_census(server, ray, known)})
        if not options.json:
            print(_line(report.census[-1]), flush=True)
        number += 1
    report.runtime_files = sorted(str(path.relative_to(server.temporary)) for path in server.temporary.rglob("*"))
    report.minutes = round((time.monotonic() - began) / 60, 1)


async def _round(
    options: argparse.Namespace,
    server: Server,
    ray: chaos_ray.RayCluster | None,
    requests: Sequence[ChaosRequest],
    number: int,
) -> tuple[dict[int, ChaosOutcome], int, int]:
    """Run the load of one round; return outcomes by request number, and the counts of disconnected clients and faults.

    The first round has no faults, and its answers are the expected ones of the others.
    """
    injector = FaultInjector(
        lambda: server.members() + ([] if ray is None else ray.members()),
        every=options.every,
        settled=options.settled,
        missed_after=options.heartbeat_timeout,
        rng=random.Random(f"{options.seed}/{number}"),
        victims=("engine", "API server", "worker"),
    )
    deadline = time.monotonic() + ROUND_SECONDS
    disconnecting = DisconnectingClients(server.url, random.Random(f"{options.seed}/leave/{number}"))
    tasks = [asyncio.create_task(disconnecting.run())]
    if number > 0 and options.every > 0:
        tasks.append(asyncio.create_task(injector.run()))
    outcomes: dict[int, ChaosOutcome] = {}
    try:
        for start in range(0, len(requests), options.concurrency * 2):
            some = requests[start : start + options.concurrency * 2]
            got = await run_load(
                server.url,
                some,
                concurrency=options.concurrency,
                may_have_hit_api_server=injector.may_have_hit_api_server,
            )
            outcomes |= dict(enumerate(got, start))
            if time.monotonic() > deadline:
                break
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
    return outcomes, disconnecting.count, len(injector.faults)


class DisconnectingClients:
    """Clients that close their streams after a few events, one after another. `count` is their number so far."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self._url = url
        self._rng = rng
        self.count = 0

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30.0, trust_env=False) as http:
            while True:
                with suppress(httpx.HTTPError):
                    await self._disconnect(http)
                await asyncio.sleep(DISCONNECT_INTERVAL_SECONDS)

    async def _disconnect(self, http: httpx.AsyncClient) -> None:
        body = {"prompt": "Return the", "max_tokens": 800, "ignore_eos": True, "stream": True}
        body |= self._rng.choice(({}, {"structured_outputs": {"regex": REGEX}, "temperature": 1.0}))
        num_events = self._rng.randrange(0, 20)
        async with http.stream("POST", "/v1/completions", json=body | {"n": self._rng.randrange(1, 4)}) as response:
            async for _ in response.aiter_lines():
                num_events -= 1
                if num_events < 0:
                    break
        self.count += 1


def _compare(outcomes: Mapping[int, ChaosOutcome], expected: dict[int, ChaosOutcome], report: SoakReport) -> None:
    """Compare each answer with the first one to the same request."""
    for number, outcome in outcomes.items():
        if outcome.failure is not None:
            report.failures.append(f"request {number} ({outcome.request.kind}): {outcome.failure}")
            continue
        before = expected.setdefault(number, outcome)
        assert before.answer is not None and outcome.answer is not None
        found = find_differences(before.answer, outcome.answer)
        report.mismatches += [f"request {number} ({outcome.request.kind}): {what}" for what in found]


def _census(server: Server, ray: chaos_ray.RayCluster | None, known: set[str]) -> dict[str, float]:
    """Count everything that could leak."""
    pids = set(processes_with(server.own_mark))
    if ray is not None:
        pids |= {member.pid for member in ray.members() if member.kind in ("engine", "worker")}
    figures: dict[str, float] = {
        "RSS of all, MB": sum(_rss(pid) for pid in pids) / MEGABYTE,
        "RSS of the supervisor, MB": _rss(server.pid) / MEGABYTE,
        "descriptors": sum(_entries(pid, "fd") for pid in pids),
        "descriptors of the supervisor": _entries(server.pid, "fd"),
        "threads": sum(_entries(pid, "task") for pid in pids),
        "processes": len(pids),
        "shared memory": len(segments() - known),
        "runtime files": sum(1 for _ in server.temporary.rglob("*")),
    }
    if ray is not None:
        figures |= ray.census()
    return {name: round(value, 1) for name, value in figures.items()}


def _rss(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def _entries(pid: int, name: str) -> int:
    with suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/{name}").iterdir())
    return 0


def growth(census: Sequence[Mapping[str, float]]) -> list[str]:
    """Describe the figures that grow beyond their bounds after the warm-up rounds.

    The growth is the slope of the line through the figures, times the minutes that they span.
    """
    later = census[WARM_UP_ROUNDS:] if len(census) > WARM_UP_ROUNDS + 1 else census[1:]
    if len(later) < 2:
        return []
    minutes = [entry["minute"] for entry in later]
    span = minutes[-1] - minutes[0]
    found = []
    for name, bound in BOUNDS.items():
        values = [entry[name] for entry in later if name in entry]
        if len(values) != len(later):
            continue
        slope = statistics.linear_regression(minutes, values).slope
        allowed = max(bound.slack, bound.per_minute * span)
        if slope * span > allowed:
            found.append(f"{name}: grows by {slope:.2f} a minute, {slope * span:.1f} in {span:.1f} minutes ({values})")
    return found


def _arguments(options: argparse.Namespace) -> list[str]:
    arguments = [] if options.model is None else [options.model]
    given = {
        "--data-parallel-size": options.data_parallel_size,
        "--api-server-count": options.api_server_count,
        "--max-request-restarts": 10**6,
        "--max-engine-restarts": 10**6,
        "--heartbeat-timeout": options.heartbeat_timeout,
        "--dtype": "float32",
        **ANSWER_FORMATS,
        "--num-threads": 1,
        "--kv-cache-memory": "64MiB",
    }
    return arguments + [str(word) for pair in given.items() for word in pair]


def _line(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in figures.items())


def _shown(report: SoakReport) -> str:
    lines = [
        f"requests     {report.requests} in {report.minutes} minutes, {report.aborted} more whose clients left",
        f"blows        {report.blows}",
        f"sent again   {report.resent}, whose own API server had died",
        f"failures     {len(report.failures)}",
        f"mismatches   {len(report.mismatches)}",
        *(f"left behind: {what:<19}{len(left)} {', '.join(left)}" for what, left in report.leaks.items()),
    ]
    parts: dict[str, Sequence[str]] = {
        "growth": report.growth,
        "failure": report.failures,
        "mismatch": report.mismatches,
        "trouble": report.trouble,
    }
    for title, found in parts.items():
        lines += [f"{title}: {what}" for what in found[:SHOWN]]
    return "\n".join([*lines, "good" if report.is_good else "NOT GOOD"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of the faults")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two faults; 0 for none")
    parser.add_argument(
        "--settled", type=float, default=8.0, help="least age in seconds of most processes that are hit"
    )
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight")
    parser.add_argument("--backend", choices=["processes", "ray"], default="processes", help="what an engine is")
    parser.add_argument("--data-parallel-size", type=int, default=2, help="engines")
    parser.add_argument("--api-server-count", type=int, default=2)
    parser.add_argument("--heartbeat-timeout", type=float, default=3.0)
    parser.add_argument("--model", help="directory of a checkpoint; without it the embedded demo model")
    parser.add_argument("--json", action="store_true", help="print the report as one line of JSON")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("server", nargs="*", help="options of `eagleray serve`, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
