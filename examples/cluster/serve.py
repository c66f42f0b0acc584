"""`eagleray serve` on a Ray cluster that loses a node in the middle of streams: `python examples/cluster/serve.py`."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from ray.cluster_utils import Cluster

PROMPTS = ("Return the", "Raises", "If the", "class")
MAX_TOKENS = 300
PIECES_BEFORE_LOSS = 20
SECONDS = 120.0
NODE = {"num_cpus": 1, "object_store_memory": 80_000_000, "include_dashboard": False}


def main() -> None:
    # Three nodes on this machine, of which two have a resource that engines need.
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        nodes = [cluster.add_node(**NODE, resources={"engine": 1}) for _ in range(2)]
        with serve(cluster.address) as url, ThreadPoolExecutor(len(PROMPTS)) as pool:
            undisturbed = list(pool.map(lambda prompt: complete(url, prompt), PROMPTS))
            halfway = threading.Barrier(len(PROMPTS) + 1, timeout=SECONDS)
            running = [pool.submit(complete, url, prompt, halfway) for prompt in PROMPTS]
            halfway.wait()
            cluster.remove_node(nodes[0])
            print("a node is gone, and one of two engines with it")
            assert [answer.result(SECONDS) for answer in running] == undisturbed
            print(f"{len(PROMPTS)} streams went on with the same text")
    finally:
        cluster.shutdown()


@contextlib.contextmanager
def serve(ray_address: str) -> Iterator[str]:
    """Serve the embedded model with an engine on each node that has the resource. Yields the server's address."""
    options = f"--port 0 --ray-address {ray_address} --data-parallel-backend ray --data-parallel-size 2".split()
    resources = ["--ray-worker-resources", json.dumps({"CPU": 1, "engine": 1}), "--num-threads", "1"]
    command = [sys.executable, "-m", "eagleray", "serve", *options, *resources, "--shutdown-timeout", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                sys.stderr.write(line)
                if match := re.search(r"serving .* at (http://\S+)/v1", line):
                    break
            else:
                raise RuntimeError("the server ended before it served")
            threading.Thread(target=process.stderr.read, daemon=True).start()  # keeps the pipe empty
            yield match[1]
        finally:
            process.terminate()


def complete(url: str, prompt: str, halfway: threading.Barrier | None = None) -> str:
    """Return a streamed completion. Waits at `halfway` after the first pieces of text."""
    body = {"model": "eagleray-demo", "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "stream": True}
    data = json.dumps(body | {"ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    text = ""
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        events = (line.removeprefix(b"data: ") for line in response if line.startswith(b"data: {"))
        for number, event in enumerate(events, 1):
            text += json.loads(event)["choices"][0]["text"]
            if halfway is not None and number == PIECES_BEFORE_LOSS:
                halfway.wait()
    return text


if __name__ == "__main__":
    main()
