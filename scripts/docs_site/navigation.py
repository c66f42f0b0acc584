"""Navigation of the site: every page, in groups. Pages that do not exist yet are left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from docs_site.markdown import directive

REFERENCE = "reference"
"""Folder of the pages that are made from the code."""
INDEX = "index.md"
"""The page that README.md becomes."""

NAVIGATION: Mapping[str, Sequence[str]] = {
    "Start": ("examples/README.md", "docs/models.md", "docs/from_vllm.md", "docs/compatibility.md", "CHANGELOG.md"),
    "How-to": (
        "docs/cluster.md",
        "docs/multi_node.md",
        "docs/ray_serve.md",
        "docs/ray_data.md",
        "docs/rl_rollouts.md",
        "docs/deployment.md",
        "docs/serving.md",
        "docs/dashboard.md",
        "docs/recovery.md",
        "docs/tuning.md",
        "docs/lora.md",
        "docs/security.md",
        "docs/gpu.md",
        "docs/building.md",
    ),
    "Reference": (
        f"{REFERENCE}/cli.md",
        f"{REFERENCE}/options.md",
        f"{REFERENCE}/http.md",
        f"{REFERENCE}/python.md",
        f"{REFERENCE}/metrics.md",
        "docs/rl.md",
        "docs/routed_experts.md",
        "docs/limits.md",
        "docs/glossary.md",
        "eagleray/demo_model/MODEL_CARD.md",
    ),
    "Internals": (
        "docs/architecture.md",
        "docs/liveness.md",
        "docs/fleet.md",
        "docs/executors.md",
        "docs/expert_parallel.md",
        "docs/wire.md",
        "docs/testing.md",
        "docs/decisions/README.md",
        "docs/progress.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ),
    "Performance": ("docs/performance.md",),
}

DECISIONS = "docs/decisions"
"""Folder whose pages are below its own README.md."""


def listed_pages() -> list[str]:
    return [page for pages in NAVIGATION.values() for page in pages]


def toctrees(root: Path) -> str:
    """Return the tables of contents of the pages below `root` that exist, one for each group."""
    return "".join(
        _toctree([page for page in pages if (root / page).exists()], caption=group)
        for group, pages in NAVIGATION.items()
    )


def decisions_toctree(root: Path) -> str:
    """Return the table of contents of the decisions, by their numbers."""
    return _toctree(sorted(path.name for path in (root / DECISIONS).glob("[0-9]*.md")))


def _toctree(pages: Sequence[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return directive("toctree", "", "\n".join([*options, *(page.removesuffix(".md") for page in pages)]))
