"""A program that starts an engine's workers, and an actor that starts such a program.

Arguments of the program: the Ray context, as JSON, and a directory for sockets.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

from eagleray.cluster.context import current_ray_context
from eagleray.messages.workers import GroupOpened, RayContext

HERE = str(Path(__file__).parent)


class Caller:
    """An actor that starts an engine as its child process, as `LLM` does."""

    def start_engine(self) -> str:
        """Return the placement group that the program used, and the processes of its workers."""
        context = current_ray_context()
        assert context is not None
        with tempfile.TemporaryDirectory(prefix="er-") as runtime_dir:
            command = [sys.executable, __file__, msgspec.json.encode(context).decode(), runtime_dir]
            return subprocess.run(command, input="", capture_output=True, text=True, timeout=50, check=True).stdout


def main() -> None:
    from ray_cluster import FAR, config, new_engine
    from ray_workers import Facts

    from eagleray.executor.executor import Executor
    from eagleray.executor.ray_actors import start_ray_actors
    from eagleray.messages.steps import OpenGroup

    context = msgspec.json.decode(sys.argv[1], type=RayContext)
    group = start_ray_actors(
        new_engine(),
        config(tp=2, resources=FAR, ray_runtime_env={"env_vars": {"PYTHONPATH": HERE}}),
        runtime_dir=Path(sys.argv[2]),
        context=context,
        worker="ray_workers:echo",
    )
    replies = Executor(group).call(OpenGroup("engine"), GroupOpened, timeout=20)
    pids = [msgspec.json.decode(reply.store or "", type=Facts).pid for reply in replies]
    print(context.placement_group, *pids, flush=True)
    sys.stdin.read()
    group.close()


if __name__ == "__main__":
    main()
