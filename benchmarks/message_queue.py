"""Round-trip times of the queue between an engine and its workers: p50 and p99 in microseconds.

python benchmarks/message_queue.py [--peers 1 2 4] [--medium "shared memory"] [--repeat 20000]

`busy`: 500 bytes to every peer and back, one round trip after the other. `after idleness`: the same after 1.5 s
without messages. `1 MB`: an array of 1,000,000 bytes to every peer and back.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from eagleray.errors import ChannelClosed
from eagleray.transport.message_queue_hub import MessageQueueHub
from eagleray.transport.message_queue_peer import MessageQueuePeer
from eagleray.transport.runtime_dir import make_runtime_dir, remove_runtime_dir

SECONDS = 30.0
IDLE_SECONDS = 1.5


def main() -> None:
    if sys.argv[1:2] == ["--echo"]:
        echo(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--medium", default="shared memory", choices=["shared memory", "ipc", "tcp"])
    parser.add_argument("--repeat", type=int, default=20_000)
    arguments = parser.parse_args()
    print(f"{arguments.medium}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("| peers | busy p50 | p99 | after idleness p50 | max | 1 MB p50 | p99 |\n|---|---|---|---|---|---|---|")
    for num_peers in arguments.peers:
        measure(num_peers, arguments.medium, arguments.repeat)


def measure(num_peers: int, medium: str, repeat: int) -> None:
    runtime_dir = make_runtime_dir()
    queue = MessageQueueHub.open(num_peers=num_peers, runtime_dir=runtime_dir, host="127.0.0.1")
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "--echo", medium],
            stdin=subprocess.PIPE,
        )
        for _ in range(num_peers)
    ]
    try:
        for peer, child in enumerate(children):
            child.stdin.write(queue.ticket(peer))
            child.stdin.close()
        queue.wait_for_peers(SECONDS, lambda: None)
        small, large = [bytes(500)], [bytes(500), bytes(1_000_000)]
        busy = [round_trip(queue, num_peers, small) for _ in range(repeat)][repeat // 10 :]
        idle = []
        for _ in range(5):
            time.sleep(IDLE_SECONDS)
            idle.append(round_trip(queue, num_peers, small))
        big = [round_trip(queue, num_peers, large) for _ in range(repeat // 20)][repeat // 200 :]
        print(
            f"| {num_peers} | {middle(busy)} | {high(busy)} | {middle(idle)} | {max(idle):.0f} "
            f"| {middle(big)} | {high(big)} |",
            flush=True,
        )
    finally:
        queue.close()
        for child in children:
            child.wait(SECONDS)
        remove_runtime_dir(runtime_dir)


def round_trip(queue: MessageQueueHub, num_peers: int, frames: list[bytes]) -> float:
    """Send `frames` to every peer and return the microseconds until all have answered."""
    start = time.perf_counter()
    queue.send(frames, SECONDS)
    for _ in range(num_peers):
        assert queue.receive(SECONDS) is not None
    return (time.perf_counter() - start) * 1e6


def echo(medium: str) -> None:
    listener = MessageQueuePeer.open(sys.stdin.buffer.read(), timeout=SECONDS, media=[medium])
    try:
        while True:
            if (frames := listener.receive(SECONDS)) is not None:
                listener.send(frames, SECONDS)
    except ChannelClosed:
        listener.close()


def middle(figures: list[float]) -> str:
    return f"{statistics.median(figures):.1f}"


def high(figures: list[float]) -> str:
    return f"{statistics.quantiles(figures, n=100)[98]:.1f}"


if __name__ == "__main__":
    main()
