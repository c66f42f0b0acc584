"""The sources of the documentation's site: every document is in its navigation, and the reference has every name."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest
from docs_site import navigation, stage
from docs_site.cli_page import page as cli_page
from docs_site.flag_table import tables
from docs_site.http_page import page as http_page
from docs_site.http_page import read_document
from docs_site.markdown import directive, plain, table
from docs_site.metrics_page import labels_of, read_families
from docs_site.metrics_page import page as metrics_page
from docs_site.navigation import INDEX, REFERENCE, listed_pages
from docs_site.options_page import flags_of
from docs_site.options_page import page as options_page
from docs_site.python_page import page as python_page

import eagleray
from eagleray.cli.commands import COMMANDS
from eagleray.config.build import field_owners
from eagleray.config.vllm_options import flag
from eagleray.config.vllm_table import TABLE

ROOT = Path(__file__).parents[3]


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with a README, a page that links to all kinds of places, and a decision."""
    pages = {"Start": ("docs/models.md", f"{REFERENCE}/cli.md"), "Internals": ("docs/decisions/README.md",)}
    monkeypatch.setattr(navigation, "NAVIGATION", pages)
    files = {
        "README.md": "# Title\n\n[page](docs/models.md)\n",
        "docs/models.md": "[top](../README.md#title) [code](../eagleray/llm.py) "
        "[folder](decisions) [other](pictures) [left out](../notes.md) [far](https://ray.io)\n",
        "docs/decisions/README.md": "# Decisions\n",
        "docs/decisions/0001-rows.md": "# 1. Rows\n",
        "eagleray/llm.py": "text\n",
        "docs/pictures/a.svg": "",
        "notes.md": "# Notes\n",
    }
    for path, text in files.items():
        (tmp_path / "from" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "from" / path).write_text(text)
    return tmp_path / "from"


def test_navigation_has_every_document():
    documents = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    assert sorted(documents - set(listed_pages())) == [], "add these to scripts/docs_site/navigation.py"


def test_decisions_are_all_listed_by_their_page():
    folder = ROOT / "docs/decisions"
    listed = (folder / "README.md").read_text("utf-8")
    assert [path.name for path in folder.glob("[0-9]*.md") if f"]({path.name})" not in listed] == []


def test_navigation_lists_a_page_once():
    assert len(listed_pages()) == len(set(listed_pages()))


def test_navigation_lists_pages_that_exist():
    made = [f"{REFERENCE}/{name}.md" for name in stage.PAGES]
    assert [page for page in listed_pages() if page not in made and not (ROOT / page).exists()] == []


def test_write_sources_links_lead_to_pages_and_copies(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PAGES", {"cli": lambda: "# Command line\n"})
    stage.write_sources(repository, tmp_path / "to")
    models = (tmp_path / "to/docs/models.md").read_text()
    assert models == (
        "[top](../index.md#title) [code](../eagleray/llm.py) [folder](decisions/README.md) other left out "
        "[far](https://ray.io)\n"
    )
    assert (tmp_path / "to/eagleray/llm.py").read_text() == "text\n"
    index = (tmp_path / "to" / INDEX).read_text()
    assert index.startswith("# Title\n\n[page](docs/models.md)\n")
    assert f":caption: Start\n\ndocs/models\n{REFERENCE}/cli\n" in index
    assert "0001-rows\n" in (tmp_path / "to/docs/decisions/README.md").read_text()


def test_write_sources_puts_tables_in_place_of_comments(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(stage, "PAGES", {})
    monkeypatch.setattr(stage, "TABLES", {"flags": lambda: "| a |"})
    (repository / "docs/models.md").write_text("before\n\n<!-- table: flags -->\n")
    stage.write_sources(repository, tmp_path / "to")
    assert (tmp_path / "to/docs/models.md").read_text() == "before\n\n| a |\n"


def test_options_page_has_every_option():
    page = options_page()
    assert [name for name in field_owners() if f"`{name}`" not in page] == []
    assert "```{option} --max-num-seqs N\n" in page
    assert "integer, at least 1; default `256`; `max_num_seqs`; `EAGLERAY_MAX_NUM_SEQS`" in page


def test_cli_page_has_every_command():
    page = cli_page()
    assert [name for name in COMMANDS if f"## eagleray {name}\n" not in page] == []
    assert "| `--max-num-seqs N` | Most requests that run at the same time. (default: 256) |" in page
    assert "eagleray serve [OPTIONS] [MODEL]\n" in page
    assert "eagleray run-batch [OPTIONS] -i FILE -o FILE [MODEL]\n" in page
    assert "eagleray completion [OPTIONS] SHELL\n" in page


@pytest.mark.parametrize(
    ("keywords", "flag"),
    [
        ({"action": "store_true"}, "--a"),
        ({"metavar": "N"}, "--a N"),
        ({"choices": ("b", "c")}, "--a {b,c}"),
        ({"nargs": "?"}, "--a [A]"),
        ({"nargs": "+", "choices": ("b", "c")}, "--a {b,c} …"),
        ({"nargs": "*", "metavar": "B"}, "--a [B …]"),
    ],
)
def test_flags_of_shows_choices_and_numbers_of_values(keywords, flag):
    assert flags_of(argparse.ArgumentParser().add_argument("--a", **keywords)) == flag


def test_http_page_has_every_route_and_body():
    document = read_document(enable_sglang_api=True)
    page = http_page()
    routes = [f"### {method.upper()} {path}" for path, item in document["paths"].items() for method in item]
    assert [route for route in routes if "PARAMETERS" not in route and f"{route}\n" not in page] == []
    assert [name for name in document["components"]["schemas"] if f"### {name}\n" not in page] == []


def test_http_page_explains_every_status_of_an_error():
    page = http_page()
    listed = {status for statuses in re.findall(r"Errors: ([\d, ]+)\.", page) for status in statuses.split(", ")}
    assert {"400", "503", "529"} <= listed
    assert [status for status in sorted(listed) if f"| {status} |" not in page] == []


def test_metrics_page_has_the_labels_of_every_family():
    page = metrics_page()
    labels = {family.name: labels_of(family) for family in read_families()}
    assert labels["eagleray:http_requests"] == ["method", "route", "status"]
    assert [name for name in labels if name.startswith("eagleray:") and f"`{name}" not in page] == []


def test_python_page_has_every_public_name(monkeypatch):
    monkeypatch.setattr("docs_site.python_page.MODULES", ("eagleray", "eagleray.errors"))  # others import much
    page = python_page()
    names = [name for name in eagleray.__all__ if not name.startswith("__")]
    assert [name for name in names if f"}} {name}" not in page] == []
    assert "`{py:method} generate(prompts: PromptsLike," in page
    assert "`{py:attribute} max_tokens\n:type: int | None\n" in page
    assert "`{py:attribute} DELTA\n:value: 1\n" in page
    assert "`{py:attribute} prompt\n:type: str\n" in page
    assert "`{py:property} is_running\n:type: bool\n" in page
    assert "`{py:class} LLM(model: str | None = None, **options: Unpack[LLMKeywords])\n" in page
    assert "Another name of `AsyncLLM`." in page
    assert "Derived from `UserError`." in page


def test_flag_tables_have_every_flag_of_vllm():
    text = tables()
    assert [name for name in TABLE.keys() - field_owners().keys() if f"`{flag(name)}`" not in text] == []


def test_plain_escapes_marks_outside_of_code():
    assert plain("a *b* `c*d`\n <e>") == r"a \*b\* `c*d` \<e\>"


def test_table_escapes_bars():
    assert table(("a", "b"), [("`x|y`", "z")]) == "| a | b |\n|---|---|\n| `x\\|y` | z |\n\n"


def test_table_without_rows_is_empty():
    assert table(("a",), []) == ""


def test_directive_fence_is_longer_than_those_in_its_body():
    assert directive("a", "b", directive("c", "d", "text")) == "````{a} b\n```{c} d\ntext\n```\n````\n\n"
