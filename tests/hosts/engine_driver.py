"""The program that uses engines in the tests of several hosts. It executes commands, one line of JSON each.

`ray_hosts.Driver` sends them.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from agreement import answers
from harness import LocalEngine

from eagleray import LLM, SamplingParams

# Ray prints the output of workers to stdout, so results go to a copy of it.
ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

PROMPTS = [[5 + row, 6, 7] for row in range(4)]


class Commands:
    """Commands of the driver, one method each. The return value is the result that is sent back."""

    def __init__(self) -> None:
        self._engine: LocalEngine | None = None
        self._llm: LLM | None = None

    def answers(self, checkpoint: str, path: str, options: dict[str, Any]) -> None:
        Path(path).write_bytes(pickle.dumps(answers(Path(checkpoint), **options)))

    def open(self, checkpoint: str, options: dict[str, Any]) -> dict[str, Any]:
        """Open an engine in this process."""
        self._engine = LocalEngine(Path(checkpoint), num_kv_blocks=64, **options)
        topology = self._engine.executor._group.topology
        return {"nodes": topology.nodes, "addresses": topology.addresses}

    def step(self) -> list[int]:
        assert self._engine is not None
        self._engine.add("0", PROMPTS[0], max_tokens=8)
        return self._engine.run()["0"].token_ids

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._llm is not None:
            self._llm.close()
            self._llm = None

    def open_llm(self, checkpoint: str, options: dict[str, Any]) -> None:
        """Open an engine in a process of its own."""
        self._llm = LLM(checkpoint, num_threads=1, num_kv_blocks=128, **options)

    def tokens(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return the tokens of greedy answers."""
        assert self._llm is not None
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, params, use_tqdm=False)]

    def generate_until_it_fails(self) -> None:
        """Send requests without a pause, in rounds. Every round must give the tokens of the first."""
        self._generate(float("inf"))

    def generate_until(self, seconds: float) -> int:
        """Send requests for `seconds`, and to the end of the round; return the number of rounds."""
        return self._generate(time.monotonic() + seconds)

    def _generate(self, end: float) -> int:
        first, num_rounds = self.tokens(PROMPTS, 50), 1
        say(event="round")
        while time.monotonic() < end:
            assert self.tokens(PROMPTS, 50) == first, "a round gave other tokens"
            num_rounds += 1
            say(event="round")
        return num_rounds

    def join(self, address: str) -> None:
        """Become a driver of the Ray cluster, without an engine."""
        import ray

        ray.init(address=address, log_to_driver=False)

    def cluster(self, address: str) -> dict[str, Any]:
        """Return the nodes, actors and placement groups of the Ray cluster that are alive."""
        import ray
        from ray._private.state import actors
        from ray.util.placement_group import placement_group_table

        ray.init(address=address, log_to_driver=False)
        try:
            return {
                "nodes": {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]},
                "actors": [entry["Name"] for entry in actors().values() if entry["State"] != "DEAD"],
                "groups": [name for name, entry in placement_group_table().items() if entry["state"] != "REMOVED"],
            }
        finally:
            ray.shutdown()


def say(**message: Any) -> None:
    print(json.dumps({"time": time.monotonic(), **message}), file=ANSWERS, flush=True)


def main() -> None:
    commands = Commands()
    say(event="ready")
    for line in sys.stdin:
        command = json.loads(line)
        try:
            result = getattr(commands, command.pop("do"))(**command)
        except Exception as error:
            say(error=type(error).__name__, message=str(error))
        else:
            say(result=result)


if __name__ == "__main__":
    main()
