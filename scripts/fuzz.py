"""Attacks on a server, while another client's stream, /live and the server's memory are monitored.

python scripts/fuzz.py [--seed 3] [--seconds 120] [--only bodies] [--attack NAME] [--list] [-- options of serve]

The program starts `eagleray serve` on the embedded model and sends it hostile bodies, raw HTTP, and requests whose
answers it stops reading; and it starts servers on damaged checkpoints. An attack is bad if a canary's stream pauses for
more than a second, /live takes more than half a second, an answer is a 5xx or an error in another than the documented
form, a process exits, or memory grows by more than 300 MB or is not returned.

The exit code is 0 if no attack was bad; otherwise the report says how to repeat each one alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from urllib.parse import urlsplit

import fuzzing.bodies
import fuzzing.broken_checkpoints
import fuzzing.constraints
import fuzzing.raw_http
import fuzzing.readers
import fuzzing.surroundings
from chaos_server import ChaosFailed, Server, exit_on_sigterm
from fuzzing.arena import Arena, Attack, registered
from fuzzing.canary import Canary, Notes
from fuzzing.values import encode
from fuzzing.verdict import AttackOutcome, Limits, judge, table
from fuzzing.wire import Address, Broken, get, post

GROUPS = ("bodies", "http", "readers", "checkpoints", "surroundings")
NICENESS = 5
"""Niceness of attacks, which yield the processor to the server and the canary on small machines."""

ATTACK_SECONDS = 180.0
SETTLE_SECONDS = 10.0
"""Time after an attack within which none of its requests runs and its memory is returned."""

REACTION_SECONDS = 60.0
"""Time after which a server that answers no client after an attack is given up."""

LEAST_RANDOM_SECONDS = 5.0
WARM_UP_PROMPTS = 44
WARM_UP_TOKENS = 800


def main() -> int:
    options = _parser().parse_args()
    options.streams = options.streams or options.api_server_count
    chosen = _chosen(options)
    if options.list:
        for each in chosen:
            print(f"{each.name:<38}{each.group:<14}{each.about}")
        return 0
    exit_on_sigterm()
    _raise_open_files()
    outcomes = _run(options, chosen)
    print("\n" + table(outcomes), flush=True)
    bad = [outcome for outcome in outcomes if outcome.violations]
    for outcome in bad:
        print(f'\n{outcome.name}: repeat it by ARGS="--attack {outcome.name} --seed {options.seed}"')
        print("\n".join(f"  - {violation}" for violation in outcome.violations))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    not_run = [each.name for each in chosen if each.name not in {outcome.name for outcome in outcomes}]
    if not_run:
        print(f"\nnot run within {options.seconds:g} s: {', '.join(not_run)}")
    verdict = "bad" if bad else "good"
    print(f"\n{len(outcomes) - len(bad)} of {len(outcomes)} attacks were noticed by nobody else: {verdict}")
    return 1 if bad else 0


def _chosen(options: argparse.Namespace) -> list[Attack]:
    attacks = registered()
    if unknown := [name for name in options.attack if name not in attacks]:
        sys.exit(f"fuzz: there is no attack {unknown[0]!r}; --list shows them")
    if options.attack:
        return [attacks[name] for name in options.attack]
    return [each for each in attacks.values() if each.group in (options.only or GROUPS)]


def _run(options: argparse.Namespace, chosen: Sequence[Attack]) -> list[AttackOutcome]:
    """Run named attacks in an order that the seed determines, then random ones, which share the remaining time."""
    deadline = time.monotonic() + options.seconds
    named = [each for each in chosen if not each.is_random]
    at_random = [each for each in chosen if each.is_random]
    if not options.attack:
        random.Random(options.seed).shuffle(named)
    reserve = 2 * LEAST_RANDOM_SECONDS * len(at_random)
    outcomes: list[AttackOutcome] = []
    with contextlib.ExitStack() as stack:
        servers = ServerPool(options, stack)
        for each in named:
            if options.attack or time.monotonic() < deadline - reserve:
                outcomes.append(_shown(servers.attack(each, LEAST_RANDOM_SECONDS), options))
        for number, each in enumerate(at_random):
            left = (deadline - time.monotonic()) / (len(at_random) - number) - SETTLE_SECONDS / 2
            if options.attack or left > 0:
                outcomes.append(_shown(servers.attack(each, max(left, LEAST_RANDOM_SECONDS)), options))
    return outcomes


def _shown(outcome: AttackOutcome, options: argparse.Namespace) -> AttackOutcome:
    print(table([outcome]).splitlines()[1], flush=True)
    for text in outcome.refusals if options.verbose else ():
        print(f"      {text}")
    for text in outcome.violations:
        print(f"    - {text[:500]}", flush=True)
    return outcome


class ServerPool:
    """The servers that attacks need, each started with the first attack that needs it, and stopped with `stack`."""

    def __init__(self, options: argparse.Namespace, stack: contextlib.ExitStack) -> None:
        self._options = options
        self._stack = stack
        self._servers: dict[int | None, MonitoredServer] = {}

    def attack(self, attack: Attack, seconds: float) -> AttackOutcome:
        if not attack.needs_server:
            return _attack_alone(attack, self._options, seconds)
        key = attack.open_files
        try:
            if key not in self._servers:
                self._servers[key] = self._stack.enter_context(_open_server(self._options, key))
            return self._servers[key].attack(attack, seconds)
        except ChaosFailed as error:  # the next attack gets another server
            self._servers.pop(key, None)
            return AttackOutcome(attack.name, violations=[str(error)[-3000:]])


def _attack_alone(attack: Attack, options: argparse.Namespace, seconds: float) -> AttackOutcome:
    """Run an attack that starts servers of its own."""
    arena = Arena(("127.0.0.1", 0), seed=options.seed, seconds=seconds, case=options.case)
    began = time.monotonic()
    with _niceness():
        _run_attack(attack, arena, ATTACK_SECONDS + seconds)
    outcome = AttackOutcome(attack.name)
    judge(outcome, arena, Notes(), Limits(), seconds=time.monotonic() - began)
    return outcome


def _run_attack(attack: Attack, arena: Arena, seconds: float) -> None:
    try:
        asyncio.run(asyncio.wait_for(attack.run(arena), seconds))
    except TimeoutError:
        arena.find(f"the attack had not finished after {seconds:.0f} s; in flight: {_oldest(arena)}")
    except (OSError, EOFError, Broken) as error:  # the server closed the connection unexpectedly
        arena.find(f"the attack ended early: {type(error).__name__}: {error}")


class MonitoredServer:
    """A server with its canary, on which attacks run one after another."""

    def __init__(self, server: Server, canary: Canary, options: argparse.Namespace) -> None:
        self._server = server
        self._canary = canary
        self._options = options
        self._address = _address(server)

    def attack(self, attack: Attack, seconds: float) -> AttackOutcome:
        """Run an attack, wait until the server has handled all of it, and judge. Raises `ChaosFailed`."""
        outcome = AttackOutcome(attack.name)
        arena = Arena(self._address, seed=self._options.seed, seconds=seconds, case=self._options.case)
        self._canary.notes()
        time.sleep(0.5)  # so that the first new notes are from before the attack
        began = time.monotonic()
        _run_attack(attack, arena, ATTACK_SECONDS + seconds)
        notes = self._settled(arena)
        judge(outcome, arena, notes, Limits(), seconds=time.monotonic() - began)
        self._server.check()
        return outcome

    def _settled(self, arena: Arena) -> Notes:
        """Return the notes up to the time when the server has recovered, or should have."""
        notes = self._canary.notes()
        limits = Limits()
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            time.sleep(0.5)
            news = self._canary.notes()
            _extend(notes, news)
            is_answered = bool(news.num_tokens) and not any(seconds > 0.5 for _, seconds, _ in news.live)
            load = asyncio.run(_load(self._address))
            is_back = notes.memory[-1][1] - notes.memory[0][1] <= limits.left_bytes
            if is_answered and is_back and load <= self._options.streams:
                return notes
            if time.monotonic() > deadline and (is_answered or time.monotonic() > deadline + REACTION_SECONDS):
                if load > self._options.streams:
                    arena.find(f"{load} sequences still run or wait {SETTLE_SECONDS:g} s after the attack has ended")
                if not is_answered:
                    arena.find(f"another client gets nothing {SETTLE_SECONDS + REACTION_SECONDS:g} s after the attack")
                return notes


def _extend(notes: Notes, news: Notes) -> None:
    for name in ("gaps", "first_tokens", "live", "memory", "pids", "troubles", "turned_away", "late"):
        getattr(notes, name).extend(getattr(news, name))
    notes.num_tokens += news.num_tokens


def _oldest(arena: Arena) -> str:
    return ", ".join(sorted(arena.in_flight, key=arena.in_flight.__getitem__)[:4]) or "nothing"


@contextlib.contextmanager
def _open_server(options: argparse.Namespace, open_files: int | None) -> Iterator[MonitoredServer]:
    with tempfile.TemporaryDirectory(prefix="fuzz-") as directory:
        root = Path(directory)
        words = ["--num-threads", 1, "--kv-cache-memory", "64MiB", "--api-server-count", options.api_server_count]
        log = options.log or root / "log"
        server = Server([*map(str, words), *options.server], root, log=log)
        canary = None
        try:
            if open_files is not None:  # early enough: it has not started a process yet
                resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files, open_files))
            server.wait_until_serving()
            asyncio.run(_warm_up(_address(server), random.Random(options.seed)))
            canary = Canary(_address(server), server.pid, num_streams=options.streams)
            with _niceness():
                yield MonitoredServer(server, canary, options)
            canary.stop()
            if (code := server.stop()) != 0:
                print(f"told to stop, the server ended with exit code {code}:\n{server.log[-2000:]}")
        finally:
            if canary is not None:
                canary.stop()
            server.kill()


@contextlib.contextmanager
def _niceness() -> Iterator[None]:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, before + NICENESS)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):  # only root may lower it; otherwise later servers keep it
            os.setpriority(os.PRIO_PROCESS, 0, before)


def _address(server: Server) -> Address:
    where = urlsplit(server.url)
    assert where.port is not None
    return where.hostname or "127.0.0.1", where.port


async def _warm_up(address: Address, rng: random.Random) -> None:
    """Use the caches of tokens and grammars and every endpoint once, so that later growth is no first use."""
    prompts = [[rng.randrange(3, 4000) for _ in range(WARM_UP_TOKENS)] for _ in range(WARM_UP_PROMPTS)]
    bodies: list[tuple[str, dict[str, object]]] = [
        ("/v1/completions", {"prompt": prompts, "max_tokens": 2}),
        ("/v1/completions", {"prompt": "x", "n": 60, "temperature": 1, "max_tokens": 60, "logprobs": 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}),
        ("/tokenize", {"prompt": "the river " * 100}),
        ("/v1/completions", {"prompt": 5.5}),
    ]
    for path, body in bodies:
        await post(address, path, encode(body))
    await fuzzing.constraints.warm_up(address)
    await get(address, "/openapi.json")
    await get(address, "/metrics")


async def _load(address: Address) -> int:
    """Return the number of sequences that run or wait on all engines; `sys.maxsize` if there is no answer."""
    reply = await get(address, "/server_info", seconds=5)
    if reply.status != 200:
        return sys.maxsize
    return sum(_busy(entry) for entry in reply.json()["engines"])


def _busy(entry: dict[str, object]) -> int:
    load = entry.get("load") or entry
    assert isinstance(load, dict)
    return int(load.get("num_running", 0)) + int(load.get("num_waiting", 0))


def _raise_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of everything that is random")
    parser.add_argument("--seconds", type=float, default=900.0, help="for all attacks together")
    parser.add_argument("--only", action="append", choices=GROUPS, help="attacks of this group; may be given again")
    parser.add_argument("--attack", action="append", default=[], metavar="NAME", help="this attack; may be given again")
    parser.add_argument("--case", type=int, help="only this case of a random attack")
    parser.add_argument("--list", action="store_true", help="show the attacks, and run none")
    parser.add_argument("--api-server-count", type=int, default=1)
    parser.add_argument("--streams", type=int, help="streams of the canary; as many as API servers without it")
    parser.add_argument("--verbose", action="store_true", help="also show how requests were refused")
    parser.add_argument("--json", type=Path, help="file for the figures of all attacks")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("server", nargs="*", help="options of `eagleray serve`, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
