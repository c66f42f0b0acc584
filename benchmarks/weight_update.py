"""Speed of weights on their way from a trainer's process to one worker: seconds and GB/s for each backend.

python benchmarks/weight_update.py [--gigabytes 1.2] [--rounds 5] [--only disk shm gloo] [--trial]

The backends alternate with a memory copy of the same tensors and with plain broadcasts of gloo, so that other load
disturbs all of them alike. A round ends when the worker has copied every tensor. Writing the file or the segment is not
part of disk and shm; sending is part of gloo. The directory is in the page cache. `--trial` runs everything once with
few bytes, to test this program.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagleray.weights import Sender, SharedMemorySender
from eagleray.weights.gloo_group import BUCKET_BYTES, GlooGroup, reach_store
from eagleray.weights.receiver import ReceiverPosition, WeightReceiver, open_receiver

TENSOR_BYTES = 24 * 2**20
"""Size of a tensor: about that of a projection in a model with a few billion parameters."""
TRIAL_BYTES = 64 * 2**20
TIMEOUT = 120.0

Weights = dict[str, torch.Tensor]


def main() -> None:
    if sys.argv[1:2] == ["--sender"]:
        send_by_gloo(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["disk", "shm", "gloo"], default=["disk", "shm", "gloo"])
    parser.add_argument("--trial", action="store_true")
    arguments = parser.parse_args()
    num_bytes = TRIAL_BYTES if arguments.trial else int(arguments.gigabytes * 1e9)
    rounds = 1 if arguments.trial else arguments.rounds
    print(f"{num_bytes / 1e9:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print_table(measure(num_bytes, rounds, arguments.only), num_bytes)


def make_weights(num_bytes: int) -> Weights:
    """Return bfloat16 tensors with this total size, to within one tensor."""
    count = max(1, num_bytes // TENSOR_BYTES)
    return {f"layers.{index}.weight": torch.ones(TENSOR_BYTES // 2, dtype=torch.bfloat16) for index in range(count)}


def measure(num_bytes: int, rounds: int, backends: list[str]) -> dict[str, list[float]]:
    """Return the seconds of each round, by the name of the measurement."""
    weights = make_weights(num_bytes)
    held = {name: torch.ones_like(tensor) for name, tensor in weights.items()}
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        runs: dict[str, Callable[[], None]] = {"memory copy": lambda: copy_all(weights, held)}
        stops: list[Callable[[], None]] = []
        if "disk" in backends:
            runs["disk"] = prepare_directory(weights, held, Path(directory))
        if "shm" in backends:
            runs["shm"] = prepare_segment(weights, held, stops)
        if "gloo" in backends:
            runs |= prepare_gloo(weights, held, num_bytes, rounds + 1, stops)
        try:
            for round_number in range(rounds + 1):
                for name, run in runs.items():
                    began = time.perf_counter()
                    run()
                    if round_number > 0:  # the first round maps pages
                        seconds.setdefault(name, []).append(time.perf_counter() - began)
        finally:
            for stop in stops:
                stop()
    return seconds


def copy_all(weights: Weights, held: Weights) -> None:
    for name, tensor in weights.items():
        held[name].copy_(tensor)


def receive(receiver: WeightReceiver, update_info: dict[str, Any], held: Weights) -> None:
    """Receive an update and copy every tensor, as a model does."""
    for bucket in receiver.receive(update_info, lambda tensors: None):
        for name, tensor in bucket:
            held[name].copy_(tensor)


def receiver_of(backend: str, init_info: dict[str, Any]) -> WeightReceiver:
    receiver = open_receiver(backend, init_info, ReceiverPosition(0, torch.device("cpu")), TIMEOUT)
    receiver.connect()
    return receiver


def prepare_directory(weights: Weights, held: Weights, directory: Path) -> Callable[[], None]:
    save_file(weights, directory / "model.safetensors")
    receiver = receiver_of("disk", {})
    return lambda: receive(receiver, {"weight_dir": str(directory)}, held)


def prepare_segment(weights: Weights, held: Weights, stops: list[Callable[[], None]]) -> Callable[[], None]:
    sender = SharedMemorySender()
    stops.append(sender.close)
    info = sender.write(weights.items())
    receiver = receiver_of("shm", {})
    return lambda: receive(receiver, info, held)


def prepare_gloo(
    weights: Weights, held: Weights, num_bytes: int, rounds: int, stops: list[Callable[[], None]]
) -> dict[str, Callable[[], None]]:
    """Start a trainer in a process of its own. It alternates between plain broadcasts of gloo and the backend."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--sender", str(num_bytes), str(rounds)], stdout=subprocess.PIPE, text=True
    )
    stops.append(child.kill)
    assert child.stdout is not None
    update_port, plain_port = map(int, child.stdout.readline().split())
    info = {"master_address": "127.0.0.1", "master_port": update_port, "world_size": 2, "packed": True}
    receiver = receiver_of("gloo", info)
    stops.append(receiver.close)
    store, host = reach_store("127.0.0.1", plain_port, world_size=2, timeout=TIMEOUT, is_cancelled=lambda: False)
    group = GlooGroup(store, "plain", rank=1, size=2, host=host, timeout=TIMEOUT)
    buffer = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    update_info = Sender.update_info(weights.items())
    return {
        "gloo's broadcast": lambda: broadcast(group, buffer, num_bytes),
        "gloo": lambda: receive(receiver, update_info, held),
    }


def broadcast(group: GlooGroup, buffer: torch.Tensor, num_bytes: int) -> None:
    """Broadcast `num_bytes` bytes in pieces of the backend's size, without a copy."""
    for begin in range(0, num_bytes, len(buffer)):
        group.broadcast(buffer[: min(len(buffer), num_bytes - begin)])()


def send_by_gloo(num_bytes: int, rounds: int) -> None:
    """Run the trainer's process: send `rounds` times until it is killed."""
    weights = list(make_weights(num_bytes).items())
    updates, plain = Sender(1, timeout=TIMEOUT), Sender(1, timeout=TIMEOUT)
    print(updates.init_info["master_port"], plain.init_info["master_port"], flush=True)
    updates.connect()
    store = plain._store
    assert store is not None
    group = GlooGroup(store, "plain", rank=0, size=2, host="127.0.0.1", timeout=TIMEOUT)
    buffer = torch.ones(BUCKET_BYTES, dtype=torch.uint8)
    for _ in range(rounds):
        broadcast(group, buffer, num_bytes)
        updates.send(weights)
    threading.Event().wait()  # until it is killed: the workers may still read


def print_table(seconds: dict[str, list[float]], num_bytes: int) -> None:
    copy = statistics.median(seconds["memory copy"])
    print("| | s, median | s, range | GB/s | of a memory copy |\n|---|---|---|---|---|")
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"| {name} | {median:.3f} | {min(values):.3f}-{max(values):.3f} | {num_bytes / 1e9 / median:.2f} | "
            f"{100 * copy / median:.0f} % |"
        )


if __name__ == "__main__":
    main()
