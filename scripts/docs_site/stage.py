"""The sources of the site: the documents at their paths, with the pages and tables that are made from the code."""

from __future__ import annotations

import posixpath
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from docs_site import cli_page, flag_table, http_page, metrics_page, options_page, python_page
from docs_site.navigation import BELOW, INDEX, REFERENCE, listed_pages, pages_below, toctree_below, toctrees

PAGES: dict[str, Callable[[], str]] = {
    "cli": cli_page.page,
    "options": options_page.page,
    "http": http_page.page,
    "python": python_page.page,
    "metrics": metrics_page.page,
}
"""Pages of the reference, by name."""
TABLES: dict[str, Callable[[], str]] = {"vllm-flags": flag_table.tables}
"""Tables that take the place of a comment `<!-- table: NAME -->` in a document."""

LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
TABLE = re.compile(r"<!-- table: ([a-z-]+) -->")
README = "README.md"


def write_sources(root: Path, stage: Path) -> None:
    """Write the sources of the site, made of the repository at `root`, to the directory `stage`, which is replaced."""
    shutil.rmtree(stage, ignore_errors=True)
    (stage / REFERENCE).mkdir(parents=True)
    for name, page in PAGES.items():
        (stage / REFERENCE / f"{name}.md").write_text(page(), "utf-8")
    documents = {README, *documents_below(root)}
    for document in documents:
        text = TABLE.sub(lambda marker: TABLES[marker[1]](), (root / document).read_text("utf-8"))
        target = stage / (INDEX if document == README else document)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(Links(root, stage, document, documents).rewrite(text), "utf-8")
    with (stage / INDEX).open("a", encoding="utf-8") as index:
        index.write(f"\n{toctrees()}")
    for page in BELOW.keys() & documents:
        with (stage / page).open("a", encoding="utf-8") as parent:
            parent.write(f"\n{toctree_below(stage, page)}")


def documents_below(root: Path) -> Iterator[str]:
    """Yield the paths of the documents of the site, except the README."""
    yield from (str(path.relative_to(root)) for path in (root / "docs").rglob("*.md"))
    for page in listed_pages():
        if posixpath.dirname(page) != REFERENCE:
            yield page
            yield from (posixpath.join(posixpath.dirname(page), below) for below in pages_below(root, page))


class Links:
    """Links of a document. A file that is no page is copied beside the pages. A link to a folder leads to its README; a
    folder without one, and a document that the navigation leaves out, have no link."""

    def __init__(self, root: Path, stage: Path, document: str, documents: set[str]) -> None:
        self._root = root
        self._stage = stage
        self._folder = posixpath.dirname(document)
        self._documents = documents

    def rewrite(self, text: str) -> str:
        return LINK.sub(self._rewrite, text)

    def _rewrite(self, link: re.Match[str]) -> str:
        if "://" in link["target"]:
            return link[0]
        path = posixpath.normpath(posixpath.join(self._folder, link["target"]))
        page = INDEX if path == README else f"{path}/{README}"
        if path == README or page in self._documents:
            return f"[{link['text']}]({posixpath.relpath(page, self._folder or '.')}{link['anchor'] or ''})"
        is_page = path in self._documents
        if (self._root / path).is_dir() or (path.endswith(".md") and not is_page and (self._root / path).exists()):
            return link["text"]
        if not is_page and (self._root / path).exists():
            (self._stage / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self._root / path, self._stage / path)
        return link[0]
