"""Cost of the way between clients and engines, without HTTP and without a model.

python benchmarks/fleet.py [--engines 1 2 8 64] [--clients 1 2] [--in-flight 256] [--seconds 5]

Null engines answer every request with a token in each of their `--rate` steps per second. Clients keep `--in-flight`
requests of `--tokens` tokens running, each with a prompt of `--prompt` tokens; with `--beginnings` N, half of each
prompt is one of N shared prefixes, and the request is routed to where that prefix is cached. The table has tokens per
second; the processor time of a client for 1,000 tokens per second, in percent of a core (routing, journal, wires,
waking the reader), and of all engines together (null engines share a process: their part of the wires); and the
balance, which is the tokens of the engine with the most divided by the tokens of the engine with the fewest.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from eagleray.client.client import Client
from eagleray.client.preprocess import Prompt
from eagleray.config.build import build_config
from eagleray.identity import ClientId, EngineId
from eagleray.messages.codec import Codec
from eagleray.messages.lifecycle import Attach, SupervisorToMember
from eagleray.messages.membership import EngineInfo, Joined
from eagleray.messages.outputs import Chunk, Chunks, EngineStats, EngineToClient, FinishReason
from eagleray.messages.requests import Abort, Generate
from eagleray.messages.sampling import SamplingParams
from eagleray.messages.wires import ENGINE_INBOX, ENGINE_OUTBOX, SUPERVISOR_INBOX, SUPERVISOR_OUTBOX
from eagleray.transport.inbox import Inbox, Outbox
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

INSTANCE = "bench"
START_SECONDS = 60.0
BLOCK_SIZE, NUM_BLOCKS, VOCAB = 16, 100_000, 1000
STATS_SECONDS = 0.5
TOKEN = 5
PER_THOUSAND = 1e5
"""Factor from seconds of a core per token to percent of a core per 1,000 tokens per second."""

INFO = EngineInfo(
    architecture="Null", vocab_size=VOCAB, max_model_len=100_000, block_size=BLOCK_SIZE, num_kv_blocks=NUM_BLOCKS
)
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "generation_config": "none"}


def main() -> None:
    options = _parser().parse_args()
    if options.role is not None:
        {"client": run_client, "engines": run_engines}[options.role](options)
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; {options.in_flight} requests in flight")
    print("| engines | clients | tokens/s | a client, % of a core per 1,000 tokens/s | the engines | balance |")
    print("|---|---|---|---|---|---|")
    for num_engines in options.engines:
        for num_clients in options.clients:
            measure(options, num_engines, num_clients)


def measure(options: argparse.Namespace, num_engines: int, num_clients: int) -> None:
    runtime_dir = make_runtime_dir()
    share = options.in_flight // num_clients
    words = [sys.executable, __file__, "--runtime-dir", str(runtime_dir)]
    words += ["--engines", str(num_engines), "--clients", str(num_clients), "--in-flight", str(share)]
    for name in ("seconds", "rate", "tokens", "prompt", "beginnings"):
        words += [f"--{name}", str(getattr(options, name))]
    roles = [("engines", 0), *(("client", index) for index in range(num_clients))]
    processes: list[subprocess.Popen[str]] = []
    try:
        for role, index in roles:
            processes.append(
                subprocess.Popen([*words, "--role", role, "--index", str(index)], stdout=subprocess.PIPE, text=True)
            )
        timeout = START_SECONDS + 3 * options.seconds
        engines, *clients = (json.loads(process.communicate(timeout=timeout)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        remove_runtime_dir(runtime_dir)
    rate = sum(client["tokens"] / client["seconds"] for client in clients)
    client_cost = PER_THOUSAND * sum(client["cpu"] / client["tokens"] for client in clients) / num_clients
    engine_cost = PER_THOUSAND * engines["cpu"] / sum(engines["tokens"])
    least = min(engines["tokens"])
    balance = f"{max(engines['tokens']) / least:.2f}" if least else "some had nothing"
    print(
        f"| {num_engines} | {num_clients} | {rate:,.0f} | {client_cost:.2f} | {engine_cost:.2f} | {balance} |",
        flush=True,
    )


# A client, as in an API server.


def run_client(options: argparse.Namespace) -> None:
    asyncio.run(_run_client(options))


async def _run_client(options: argparse.Namespace) -> None:
    client_id = ClientId(INSTANCE, options.index)
    runtime_dir = Path(options.runtime_dir)
    client = Client.open(client_id, build_config(**OPTIONS), runtime_dir)
    reading = asyncio.create_task(client.run())
    await client.wait_until_ready(START_SECONDS)
    while len(client.engines) < options.engines[0]:
        await asyncio.sleep(0.01)
    rng = random.Random(options.index)
    beginnings = [_prompt(rng, options.prompt // 2) for _ in range(options.beginnings)]
    tasks = [asyncio.create_task(_keep_requesting(client, rng, beginnings, options)) for _ in range(options.in_flight)]
    await asyncio.sleep(1.0)  # until all requests run
    counted, began, cpu = COUNT["tokens"], time.perf_counter(), time.process_time()
    await asyncio.sleep(options.seconds)
    report = {
        "tokens": COUNT["tokens"] - counted,
        "seconds": time.perf_counter() - began,
        "cpu": time.process_time() - cpu,
    }
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    print(json.dumps(report))


COUNT: Counter[str] = Counter()


async def _keep_requesting(
    client: Client, rng: random.Random, beginnings: list[list[int]], options: argparse.Namespace
) -> None:
    params = SamplingParams(max_tokens=options.tokens, temperature=0, ignore_eos=True, detokenize=False)
    while True:
        beginning = rng.choice(beginnings) if beginnings else []
        prompt = [*beginning, *_prompt(rng, options.prompt - len(beginning))]
        stream = client.generate(Prompt(token_ids=prompt), params)
        async for delta in stream:
            COUNT["tokens"] += sum(len(output.token_ids) for output in delta.outputs)


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(3, VOCAB) for _ in range(length)]


# All engines, in one process that also plays the supervisor.


class NullEngine:
    """An engine without a model: it gives every request a token in each step."""

    def __init__(self, rank: int, runtime_dir: Path) -> None:
        self.engine = EngineId(INSTANCE, rank)
        self.num_tokens = 0
        self._inbox: Inbox[Any] = Inbox(runtime_dir, self.engine.label, Codec[Any](ENGINE_INBOX).decode)
        self._outbox: Outbox[ClientId, EngineToClient] = Outbox(Codec[Any](ENGINE_OUTBOX).encode)
        self._running: dict[ClientId, dict[str, tuple[int, int]]] = {}
        """For each request, the number of tokens received so far and the number it will generate."""
        self.joined = Joined(self.engine, self._inbox.address, INFO)

    def connect(self, client: ClientId, address: str) -> None:
        self._outbox.connect(client, address)
        self._running[client] = {}

    def receive(self) -> None:
        while (message := self._inbox.receive(0)) is not None:
            match message:
                case Generate(client=client, request_id=name, stopping=stopping):
                    self._running[client][name] = 0, stopping.max_tokens
                case Abort(client, names):
                    for name in names:
                        self._running[client].pop(name, None)

    def step(self) -> None:
        for client, requests in self._running.items():
            if not requests:
                continue
            chunks, tokens = [], {}
            for name, (num_sent, left) in list(requests.items()):
                if num_sent and left > 1:
                    tokens[name] = TOKEN
                else:
                    reason = None if left > 1 else FinishReason.LENGTH
                    chunks.append(Chunk(request_id=name, token_ids=[TOKEN], finish_reason=reason))
                if left > 1:
                    requests[name] = num_sent + 1, left - 1
                else:
                    del requests[name]
            self.num_tokens += len(chunks) + len(tokens)
            self._outbox.send(client, Chunks(self.engine, chunks, tokens))

    def report(self) -> None:
        num_running = sum(map(len, self._running.values()))
        stats = EngineStats(
            engine=self.engine,
            num_running=num_running,
            num_waiting=0,
            num_kv_blocks=NUM_BLOCKS,
            num_free_kv_blocks=NUM_BLOCKS - num_running,
            num_steps=0,
            num_preemptions=0,
            num_prompt_tokens=0,
            num_generation_tokens=self.num_tokens,
            num_prefix_queries=0,
            num_prefix_hits=0,
        )
        for client in self._running:
            self._outbox.send(client, stats)

    def close(self) -> None:
        self._inbox.close()
        self._outbox.close()


def run_engines(options: argparse.Namespace) -> None:
    runtime_dir = Path(options.runtime_dir)
    engines = [NullEngine(rank, runtime_dir) for rank in range(options.engines[0])]
    clients = _attach_clients([engine.joined for engine in engines], options.clients[0], runtime_dir)
    for engine in engines:
        for client, address in clients.items():
            engine.connect(client, address)
    due, stats_due, end, cpu = time.monotonic(), 0.0, time.monotonic() + options.seconds + 2.0, time.process_time()
    while (now := time.monotonic()) < end:
        for engine in engines:
            engine.receive()
            engine.step()
        if now > stats_due:
            stats_due = now + STATS_SECONDS
            for engine in engines:
                engine.report()
        due += 1 / options.rate
        time.sleep(max(0.0, due - time.monotonic()))
    print(json.dumps({"tokens": [engine.num_tokens for engine in engines], "cpu": time.process_time() - cpu}))
    for engine in engines:
        engine.close()


def _attach_clients(members: list[Joined], count: int, runtime_dir: Path) -> dict[ClientId, str]:
    """Attach each client with `members`, wait until all have answered, and return their addresses."""
    inbox: Inbox[Any] = Inbox(runtime_dir, "supervisor", Codec[Any](SUPERVISOR_INBOX).decode)
    outbox: Outbox[ClientId, SupervisorToMember] = Outbox(Codec[Any](SUPERVISOR_OUTBOX).encode)
    addresses = {}
    for index in range(count):
        client = ClientId(INSTANCE, index)
        addresses[client] = f"ipc://{runtime_dir / client.label}"
        outbox.connect(client, addresses[client])
        outbox.send(client, Attach(client, inbox.address, members))
    for _ in range(count):
        assert inbox.receive(START_SECONDS) is not None, "a client did not start"
    outbox.close()
    inbox.close()
    return addresses


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", type=int, default=[1, 2, 8, 64])
    parser.add_argument("--clients", nargs="+", type=int, default=[1])
    parser.add_argument("--in-flight", type=int, default=256, help="requests of all clients")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rate", type=float, default=50.0, help="steps of an engine in a second")
    parser.add_argument("--tokens", type=int, default=100, help="of an answer")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--beginnings", type=int, default=0, help="that prompts share the first half of; 0: none do")
    parser.add_argument("--role", choices=["client", "engines"], help=argparse.SUPPRESS)
    parser.add_argument("--index", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--runtime-dir", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
