"""Navigation of the site: every page, in groups."""

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
        "docs/routed_experts.md",
        "docs/deployment.md",
        "docs/serving.md",
        "docs/dashboard.md",
        "docs/recovery.md",
        "docs/tuning.md",
        "docs/lora.md",
        "docs/structured_outputs.md",
        "docs/speculation.md",
        "docs/quantization.md",
        "docs/tools.md",
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
        "docs/limits.md",
        "docs/glossary.md",
        "eagleray/demo_model/MODEL_CARD.md",
    ),
    "Internals": (
        "docs/architecture.md",
        "docs/liveness.md",
        "docs/fleet.md",
        "docs/scaling.md",
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

BELOW = {"docs/decisions/README.md": "[0-9]*.md", "examples/README.md": "*/README.md"}
"""Patterns of the pages that are listed below a page, relative to its folder."""


def listed_pages() -> list[str]:
    return [page for pages in NAVIGATION.values() for page in pages]


def toctrees() -> str:
    """Return the tables of contents, one for each group."""
    return "".join(_toctree(pages, caption=group) for group, pages in NAVIGATION.items())


def pages_below(root: Path, page: str) -> list[str]:
    """Return the paths of the pages below `page`, relative to its folder."""
    folder = (root / page).parent
    return sorted(str(path.relative_to(folder)) for path in folder.glob(BELOW[page])) if page in BELOW else []


def toctree_below(root: Path, page: str) -> str:
    """Return the table of contents of the pages below `page`."""
    return _toctree(pages_below(root, page))


def _toctree(pages: Sequence[str], caption: str = "") -> str:
    options = [":hidden:", *([f":caption: {caption}"] if caption else []), ""]
    return directive("toctree", "", "\n".join([*options, *(page.removesuffix(".md") for page in pages)]))
