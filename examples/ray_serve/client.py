"""Streams a completion from the application of app.py.

python examples/ray_serve/client.py --url http://127.0.0.1:8000      # prints the text as it comes
python examples/ray_serve/client.py                                  # deploys app.py and kills its engine meanwhile

Without `--url` it starts a Ray cluster, deploys the application, streams a completion, streams it again while the
engine is killed, and compares the two.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

PROMPT = "Return the"
NUM_TOKENS = 1000


def stream(url: str) -> Iterator[str]:
    """Yield the text of a completion piece by piece."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                if "error" in event:
                    sys.exit(event["error"]["message"])
                yield from (choice["text"] for choice in event["choices"])


def deploy_and_kill(port: int) -> None:
    """Compare an undisturbed stream with one whose engine is killed."""
    import ray
    from ray import serve

    ray.init(address="local", include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"port": port})
    from app import app  # here, because it asks the cluster for GPUs

    serve.run(app)
    url = f"http://127.0.0.1:{port}"
    expected = "".join(stream(url))
    pieces = stream(url)
    text = next(pieces)
    (engine,) = engines()
    print(f"killing the engine, process {engine}")
    os.kill(engine, signal.SIGKILL)
    text += "".join(pieces)
    serve.shutdown()
    ray.shutdown()
    if text != expected:
        sys.exit("the streams differ")
    print(f"{NUM_TOKENS} tokens, the same as undisturbed")


def engines() -> list[int]:
    """Return the engines of this program's cluster, whose processes descend from this one."""
    found, processes = [], [os.getpid()]
    for parent in processes:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # of processes that have just exited
            for path in Path(f"/proc/{parent}/task").glob("*/children"):
                processes += [int(child) for child in path.read_text().split()]
            words = Path(f"/proc/{parent}/cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if words[-1].startswith(b"engine-"):  # the last word of its command is its name
                found.append(parent)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="the application, where it runs already")
    parser.add_argument("--port", type=int, default=8000, help="port for Serve's proxy otherwise")
    options = parser.parse_args()
    if options.url is None:
        deploy_and_kill(options.port)
        return
    for piece in stream(options.url):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
