"""Times of the first starts from a wheel in an empty virtual environment where no compiler is found.

python benchmarks/first_start.py WHEEL [--starts N]

The wheel is installed with its dependencies, which takes minutes; then a program with `LLM` and a server are started
`--starts` times each, with an empty home directory, until they can serve the embedded model and until the first answer.
Exits with an error if the installed package does not use the prebuilt kernels.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

PROGRAM = [
    "import logging; logging.basicConfig(level=logging.INFO, format='%(message)s')",
    "from eagleray.kernels.cpu.build.library import native_library; native_library()",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--starts", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="eagleray-first-start-") as directory:
        python = install(arguments.wheel.absolute(), Path(directory, "venv"))
        environment = {"HOME": directory, "PATH": str(Path(directory, "nothing"))}
        check_kernels(python, environment, directory)
        command = [python, "-m", "eagleray.cli.main", "bench", "startup", "--repeat", str(arguments.starts)]
        subprocess.run(command, env=environment, check=True, cwd=directory)


def install(wheel: Path, directory: Path) -> Path:
    """Install a wheel in a new virtual environment and return its interpreter."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", f"{wheel}[bench]"]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": ""})
    return python


def check_kernels(python: Path, environment: dict[str, str], directory: str) -> None:
    """Exit with a message unless the installed package uses prebuilt kernels."""
    command = [python, "-c", "\n".join(PROGRAM)]
    done = subprocess.run(command, env=environment, cwd=directory, capture_output=True, text=True)
    if "using the prebuilt kernels for" not in done.stderr:
        sys.exit(f"the kernels are not the prebuilt ones:\n{done.stderr}")
    print(done.stderr.strip())


if __name__ == "__main__":
    main()
