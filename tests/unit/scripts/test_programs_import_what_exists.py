"""Programs outside the package, which no type checker reads and few tests start: what they import from it exists."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("benchmarks", "examples", "scripts", "tests")
PACKAGES = ("eagleray", "eagleray_bench")


def missing_names(text: str) -> Iterator[str]:
    """Yield each name that an import from the package does not find."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in PACKAGES:
            module = importlib.import_module(node.module or "")
            for name in (alias.name for alias in node.names):
                if not hasattr(module, name) and not is_module(f"{node.module}.{name}"):
                    yield f"{node.module}.{name}"


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # its parent is no package
        return False


@pytest.mark.parametrize("folder", FOLDERS)
def test_programs_of_folder_import_what_exists(folder):
    paths = [path for path in sorted((ROOT / folder).rglob("*.py")) if not path.name.startswith("test_")]
    missing = [f"{path.relative_to(ROOT)}: {name}" for path in paths for name in missing_names(path.read_text("utf-8"))]
    assert paths and not missing, "\n".join(["", *missing])


def test_missing_names_finds_what_does_not_exist():
    text = "def f():\n    from eagleray.errors import ConfigError, Nothing\nfrom eagleray import llm, nothing\n"
    assert sorted(missing_names(text)) == ["eagleray.errors.Nothing", "eagleray.nothing"]
