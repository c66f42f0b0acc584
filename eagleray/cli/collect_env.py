"""`eagleray collect-env`: versions, processor, memory, kernels and GPUs of this machine, for reports of problems."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import eagleray
from eagleray.cluster.secrets import may_be_secret
from eagleray.config.environment import prefixed_variables
from eagleray.process.spawn import explain_exit

DEVICE_REPORT_SECONDS = 300.0
"""Time limit of the process that imports torch; it may compile kernels."""

FEATURES = (
    *("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimdhp", "bf16", "i8mm", "sve", "sve2"),
)
"""Features of processors that kernels make use of, by the names of Linux."""

VARIABLES = ("EAGLERAY_", "RAY_", "OMP_", "CUDA_", "NCCL_", "HF_", "TORCH_", "LD_PRELOAD", "CXX")
"""Beginnings of the names of variables that change what eagleray does."""

DEVELOPMENT_EXTRAS = ("browser", "deploy", "docs", "test")
"""Extras for the development of eagleray."""

Facts = dict[str, dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def run(arguments: argparse.Namespace) -> None:
    facts = _program_facts() | {"Ray": _ray_facts()} | _device_facts()
    print(json.dumps(facts, indent=1) if arguments.json else format_facts(facts))


def format_facts(facts: Facts) -> str:
    """Return a heading for each section that has entries, and a line for each entry."""
    sections = []
    for heading, entries in facts.items():
        width = max(map(len, entries), default=0)
        if entries:
            sections.append("\n".join([heading, *(f"  {name:{width}}  {value}" for name, value in entries.items())]))
    return "\n\n".join(sections)


def processor_facts(cpuinfo: str) -> dict[str, str]:
    """Return the name and the features of the first processor that /proc/cpuinfo describes."""
    fields = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo.partition("\n\n")[0], re.MULTILINE))
    features = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "name": fields.get("model name", "unknown"),
        "features": " ".join(name for name in FEATURES if name in features) or "none that kernels use",
    }


def shown_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with a note in place of every value that may be a secret."""
    return {
        name: "(not shown: it may be a secret)" if may_be_secret(name, value) else value
        for name, value in sorted(variables.items())
    }


def _program_facts() -> Facts:
    variables = {name: value for prefix in VARIABLES for name, value in prefixed_variables(prefix).items()}
    return {
        "eagleray": {
            "version": eagleray.__version__,
            "directory": str(Path(eagleray.__file__).parent),
            "python": f"{platform.python_version()} at {sys.executable}",
            "system": f"{_distribution()}, {platform.platform()}",
        },
        "processor": {
            **processor_facts(_read(Path("/proc/cpuinfo"))),
            "architecture": platform.machine(),
            "cores": f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}",
        },
        "packages": _versions(_requirements()),
        "environment": shown_variables(variables),
    }


def _requirements() -> list[str]:
    """Return the requirements of the installed package, without those for its development."""
    try:
        found = requires("eagleray") or []
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return []
    left_out = [f'extra == "{extra}"' for extra in DEVELOPMENT_EXTRAS]
    return [requirement for requirement in found if not any(extra in requirement for extra in left_out)]


def _versions(requirements: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each required package. Those of extras are left out where they are missing."""
    found = {}
    for requirement in requirements:
        name = re.split(r"[\s\[<>=!~;(]", requirement, maxsplit=1)[0]
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            if "extra ==" not in requirement:
                found[name] = "missing"
    return found


def _ray_facts() -> dict[str, str]:
    try:
        from eagleray.cluster.connect import describe_cluster  # here, because Ray sets variables when it is imported
    except ImportError as error:
        return {"error": str(error)}
    return describe_cluster()


def _device_facts() -> Facts:
    """Return the sections of the process that imports torch, or how it failed."""
    command = [sys.executable, "-m", "eagleray.worker.device_report"]
    try:
        # In a group of its own, because Ctrl-C would make it print a traceback; it is killed then.
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, timeout=DEVICE_REPORT_SECONDS, process_group=0
        )
    except subprocess.TimeoutExpired:
        return {"torch": {"error": f"no answer within {DEVICE_REPORT_SECONDS:.0f} s"}}
    if done.returncode != 0:
        return {"torch": {"error": explain_exit(done.returncode)}}
    facts: Facts = json.loads(done.stdout.splitlines()[-1])  # libraries may print lines before it
    return facts


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux")
    except OSError:
        return platform.system()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
