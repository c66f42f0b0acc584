"""Speed of weight updates of a model: seconds from start to commit, by transport, in turn with plain copies.

python benchmarks/weight_update.py [--model dense-0.6b] [--rounds 9] [--only disk shm gloo] [--threads 2] [--trial]

An update is what a worker does: check names and shapes, receive, pack, commit. The trainer's own work, such as writing
the segment, is not part of disk and shm, but sending is part of gloo. The directory is in the page cache. A transport's
first update finds the memory that a worker requests when the transfer is opened; `unprepared` is one without it. Memory
that was free for seconds may have gone back to the host of a virtual machine; `new memory` is the time that such memory
takes to be written once.

`copy` is a copy of the checkpoint's tensors from memory to memory, by as many threads. Ratios are of the best rounds,
because other programs disturb all rounds, and in turn, so that all are disturbed. `--trial` runs a small model once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from shapes import SHAPES, make

from eagleray.kernels.cpu.huge_pages import WeightChunk
from eagleray.models.base import Model
from eagleray.models.registry import load_model
from eagleray.process.host_memory import host_free_bytes
from eagleray.weights import Sender, SharedMemorySender
from eagleray.weights.gloo_group import BUCKET_BYTES, GlooGroup, reach_store
from eagleray.weights.receiver import ReceiverPosition, WeightReceiver, open_receiver
from eagleray.worker.prefault import prefault_chunks
from eagleray.worker.staged_update import check_tensors

TIMEOUT = 120.0
FREE_SECONDS = 5.0
"""Time after which a virtual machine has given free memory back to its host."""
CPU = torch.device("cpu")
BROADCAST = "gloo's broadcast"

Weights = dict[str, torch.Tensor]
Run = Callable[[], None]


def main() -> None:
    if sys.argv[1:2] == ["--sender"]:
        send_by_gloo(Path(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense-0.6b", choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", choices=["disk", "shm", "gloo"], default=["disk", "shm", "gloo"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    checkpoint = make("dense-tiny" if arguments.trial else arguments.model, arguments.directory)
    Comparison(checkpoint, rounds=1 if arguments.trial else arguments.rounds, transports=arguments.only).run()


class Comparison:
    """Updates one model by several transports in turn, and prints a table."""

    def __init__(self, checkpoint: Path, *, rounds: int, transports: list[str]) -> None:
        self._checkpoint = checkpoint
        self._rounds = rounds
        self._transports = transports
        self._weights: Weights = load_file(checkpoint / "model.safetensors")
        self._num_bytes = sum(tensor.nbytes for tensor in self._weights.values())
        self._model = load_model(
            checkpoint, dtype="auto", load_format="auto", device=CPU, seed=None, on_progress=lambda *_: None
        )
        self._stops: list[Run] = []

    def run(self) -> None:
        print(f"{self._num_bytes / 1e9:.2f} GB, {torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f}")
        try:
            updates = {name: self._prepare(name) for name in self._transports}
            runs = {"copy": self._prepare_copy(), **updates}
            if "gloo" in updates:
                runs[BROADCAST] = self._broadcast
            unprepared = {name: self._first(update, is_prepared=False) for name, update in updates.items()}
            first = {name: self._first(update, is_prepared=True) for name, update in updates.items()}
            first["new memory"] = self._fill_new_memory()
            later: dict[str, list[float]] = {name: [] for name in runs}
            for _ in range(self._rounds):
                for name, run in runs.items():
                    later[name].append(seconds_of(run))
        finally:
            for stop in reversed(self._stops):
                stop()
        self._print(unprepared, first, later)

    def _prepare(self, transport: str) -> Run:
        if transport == "disk":
            return self._update_by(receiver_of("disk", {}), {"weight_dir": str(self._checkpoint)})
        if transport == "shm":
            sender = SharedMemorySender()
            self._stops.append(sender.close)
            return self._update_by(receiver_of("shm", {}), sender.write(self._weights.items()))
        return self._prepare_gloo()

    def _prepare_gloo(self) -> Run:
        """Start a trainer in a process of its own, which sends what a line of its standard input asks for."""
        command = [sys.executable, __file__, "--sender", str(self._checkpoint), str(torch.get_num_threads())]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stops.append(child.kill)
        assert child.stdin is not None and child.stdout is not None
        requests = child.stdin
        update_port, plain_port = map(int, child.stdout.readline().split())
        info = {"master_address": "127.0.0.1", "master_port": update_port, "world_size": 2}
        receiver = receiver_of("gloo", info)
        self._stops.append(receiver.close)
        store, host = reach_store("127.0.0.1", plain_port, world_size=2, timeout=TIMEOUT, is_cancelled=lambda: False)
        group = GlooGroup(store, "plain", rank=1, size=2, host=host, timeout=TIMEOUT)
        buffers = [torch.empty(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
        receive = self._update_by(receiver, Sender.update_info(self._weights.items()))

        def ask(what: str) -> None:
            print(what, file=requests, flush=True)

        def update() -> None:
            ask("update")
            receive()

        def plain() -> None:
            ask("plain")
            broadcast(group, buffers, self._num_bytes)

        self._broadcast = plain
        return update

    def _update_by(self, receiver: WeightReceiver, update_info: dict[str, Any]) -> Run:
        return lambda: update_model(self._model, receiver, update_info)

    def _prepare_copy(self) -> Run:
        pool = ThreadPoolExecutor(torch.get_num_threads())
        sources = [tensor.view(-1).view(torch.uint8).numpy().copy() for tensor in self._weights.values()]
        sources.sort(key=len, reverse=True)
        pairs = [(np.ones_like(source), source) for source in sources]
        return lambda: sum(pool.map(lambda pair: np.copyto(*pair) or 0, pairs))

    def _first(self, update: Run, *, is_prepared: bool) -> float:
        self._model.updates.release()
        time.sleep(FREE_SECONDS)
        if is_prepared:
            prefault_chunks(self._model.updates.prepare(), read_free=host_free_bytes).join()
        return seconds_of(update)

    def _fill_new_memory(self) -> float:
        self._model.updates.release()
        time.sleep(FREE_SECONDS)
        count = torch.get_num_threads()
        chunks = [WeightChunk.allocate(self._num_bytes // count).numpy() for _ in range(count)]
        with ThreadPoolExecutor(count) as pool:
            return seconds_of(lambda: sum(pool.map(lambda chunk: chunk.fill(1) or 0, chunks)))

    def _print(self, unprepared: dict[str, float], first: dict[str, float], later: dict[str, list[float]]) -> None:
        print("| | unprepared, s | first, s | later, s: best | median | GB/s | of a copy | of gloo's broadcast |")
        print("|---|---|---|---|---|---|---|---|")
        best = {name: min(values) for name, values in later.items()}
        for name, values in later.items():
            began = f"{unprepared[name]:.2f} | {first[name]:.2f}" if name in unprepared else " | "
            of_copy = f"{100 * best['copy'] / best[name]:.0f} %"
            of_broadcast = f"{100 * best[BROADCAST] / best[name]:.0f} %" if name == "gloo" else ""
            print(
                f"| {name} | {began} | {best[name]:.3f} | {statistics.median(values):.3f} | "
                f"{self._num_bytes / 1e9 / best[name]:.1f} | {of_copy} | {of_broadcast} |"
            )
        print(f"| new memory | {first['new memory']:.2f} | | | | | | |")


def seconds_of(run: Run) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


@torch.inference_mode()
def update_model(model: Model, receiver: WeightReceiver, update_info: dict[str, Any]) -> None:
    """Update the weights as a worker does, see `worker.weight_update`."""
    update = model.start_update()
    for bucket in receiver.receive(update_info, lambda sent: check_tensors(update, sent)):
        update.add(bucket)
    assert not update.missing() and not update.untouched()
    update.apply()
    update.drop()


def receiver_of(backend: str, init_info: dict[str, Any]) -> WeightReceiver:
    receiver = open_receiver(backend, init_info, ReceiverPosition(0, CPU), TIMEOUT)
    receiver.connect()
    return receiver


def broadcast(group: GlooGroup, buffers: list[torch.Tensor], num_bytes: int) -> None:
    """Broadcast `num_bytes` in pieces of the size of a bucket, two at once, without a copy."""
    waits: list[Run] = []
    for number, begin in enumerate(range(0, num_bytes, BUCKET_BYTES)):
        if len(waits) == len(buffers):
            waits.pop(0)()
        waits.append(group.broadcast(buffers[number % 2][: min(BUCKET_BYTES, num_bytes - begin)]))
    for wait in waits:
        wait()


def send_by_gloo(checkpoint: Path, num_threads: int) -> None:
    """Be the trainer."""
    torch.set_num_threads(num_threads)
    weights = [(name, tensor.clone()) for name, tensor in load_file(checkpoint / "model.safetensors").items()]
    updates, plain = Sender(1, timeout=TIMEOUT), Sender(1, timeout=TIMEOUT)
    print(updates.init_info["master_port"], plain.init_info["master_port"], flush=True)
    updates.connect()
    store = plain._store
    assert store is not None
    group = GlooGroup(store, "plain", rank=0, size=2, host="127.0.0.1", timeout=TIMEOUT)
    buffers = [torch.ones(BUCKET_BYTES, dtype=torch.uint8) for _ in range(2)]
    for line in sys.stdin:
        if line.strip() == "update":
            updates.send(weights)
        else:
            broadcast(group, buffers, sum(tensor.nbytes for _, tensor in weights))


if __name__ == "__main__":
    main()
