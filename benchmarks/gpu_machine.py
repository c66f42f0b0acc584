"""The machine of a run, and the tests that need its GPU."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

TESTS_TIMEOUT_SECONDS = 300
MAX_TEST_PROCESSES = 8
"""Each takes half a gigabyte of the GPU, and most of a test's time is the compilation of its kernels."""

MARK = re.compile(r"\bmark\.gpu\b")


def describe_machine(root: Path) -> dict[str, str]:
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "flashinfer": _version("flashinfer-python"),
        "commit": _output(["git", "-C", str(root), "rev-parse", "--short", "HEAD"]),
        "cpu": f"{os.cpu_count()} cores",
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        facts["capability"] = f"{properties.major}.{properties.minor}"
        query = [
            "nvidia-smi",
            "--query-gpu=driver_version,clocks.max.sm,power.limit",
            "--format=csv,noheader",
            "-i",
            "0",
        ]
        facts["driver, clock, power"] = _output(query)
    return facts


def gpu_test_files(root: Path) -> list[Path]:
    """Return the files that have tests marked gpu. No other file is collected: some need packages that a machine with a
    GPU may lack."""
    files = sorted((root / "tests" / "unit").rglob("test_*.py"))
    return [file for file in files if MARK.search(file.read_text("utf-8"))]


def run_gpu_tests(root: Path) -> dict[str, Any]:
    """Run the tests marked `gpu` in parallel. Returns the numbers of passed, failed and skipped tests, and the names of
    the failed ones."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "tests.xml"
        files = [str(file.relative_to(root)) for file in gpu_test_files(root)]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += [
            "--timeout",
            "170",
            "-W",
            "default",
            *_side_by_side(),
            *files,
        ]  # other versions have other warnings
        began = time.monotonic()
        try:
            finished = subprocess.run(
                command, cwd=root, env=_environment(root), timeout=TESTS_TIMEOUT_SECONDS, check=False
            )
            found: dict[str, Any] = {"exit": finished.returncode}
        except subprocess.TimeoutExpired:
            found = {"exit": -1, "failed": [f"the tests took more than {TESTS_TIMEOUT_SECONDS} s"]}
        return found | {"seconds": time.monotonic() - began} | read_test_report(report, found)


def read_test_report(report: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of passed and skipped tests, and the names of the others, from a file of JUnit's format."""
    failed: list[str] = list(found.get("failed", []))
    num_passed = num_skipped = 0
    if not report.exists():
        return {"passed": 0, "skipped": 0, "failed": [*failed, f"pytest left no report (exit {found.get('exit')})"]}
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}.{case.get('name')}")
        elif case.find("skipped") is not None:
            num_skipped += 1
        else:
            num_passed += 1
    if not failed and found.get("exit") not in (0, None):
        failed.append(f"pytest ended with {found['exit']}")
    if num_passed == 0:
        failed.append(f"no test has passed, {num_skipped} were skipped")
    return {"passed": num_passed, "skipped": num_skipped, "failed": failed}


def _side_by_side() -> list[str]:
    if importlib.util.find_spec("xdist") is None:
        return []
    return ["-n", str(max(1, min(MAX_TEST_PROCESSES, (os.cpu_count() or 2) // 2))), "--dist", "load"]


def _environment(root: Path) -> dict[str, str]:
    """Return the environment of the tests, which find the package without an installation."""
    paths = [str(root), str(root / "bench"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
