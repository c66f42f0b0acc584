"""Reader of the files in deploy/: manifests with their pods, and the Dockerfile."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "Dockerfile"
COMPOSE = (DEPLOY / "compose.yaml", DEPLOY / "compose.cuda.yaml")
MANIFESTS = sorted((*(DEPLOY / "kubernetes").glob("*.yaml"), *(DEPLOY / "kuberay").glob("*.yaml")))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text("utf-8")))


def ray_cluster(document: dict[str, Any]) -> dict[str, Any] | None:
    """Return the specification of the Ray cluster in a document of KubeRay, or None."""
    spec = document["spec"]
    return spec.get("rayClusterConfig") or spec.get("rayClusterSpec") or (spec if "headGroupSpec" in spec else None)


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the specification of each pod that a document describes."""
    if cluster := ray_cluster(document):
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            yield group["template"]["spec"]
    elif document["kind"] == "Deployment":
        yield document["spec"]["template"]["spec"]


@dataclass(frozen=True)
class Instruction:
    """An instruction of a Dockerfile, in the stage that has this name."""

    stage: str
    name: str
    value: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.value)


def instructions() -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text("utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    found, stage = [], ""
    for line in filter(str.strip, text.splitlines()):
        name, _, value = line.strip().partition(" ")
        if name == "FROM":
            stage = value.partition(" AS ")[2]
        found.append(Instruction(stage, name, value.strip()))
    return found


def build_arguments() -> dict[str, str]:
    """Return the defaults of the build arguments."""
    return dict(found.value.split("=", 1) for found in instructions() if found.name == "ARG")


def image_environment() -> dict[str, str]:
    """Return the variables that the image sets."""
    return dict(word.split("=", 1) for found in instructions() if found.name == "ENV" for word in found.words)
