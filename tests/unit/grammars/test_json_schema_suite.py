"""The public test suite of JSON Schema: a schema is refused, or none of its invalid values is allowed.

Both libraries are tested. The suite comes with the source distribution of jsonschema, which is downloaded once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import pytest
from grammar_walks import Walker, demo_walker, make_demo_walker, schema_errors
from random_schemas import random_schema

from eagleray.errors import InvalidRequest
from eagleray.grammars.xgrammar_compiler import XGrammarCompiler

pytestmark = pytest.mark.slow

DOWNLOAD_SECONDS = 120.0
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
MAX_ORDERS = 24

STRICTER = {
    "format.json": "formats are followed",
    "date-time.json": "there are no leap seconds",
    "time.json": "there are no leap seconds",
    "email.json": "there are no quoted names and no addresses of IPv6",
    "ipv6.json": "there are no addresses of IPv4 inside",
    "ecmascript-regex.json": "there are no control characters",
    "float-overflow.json": "integers have no exponent",
    "ref.json": "keywords beside `$ref` are followed in old drafts too",
}
"""Files of the suite with valid values that the grammar does not allow, and why."""
ANNOTATIONS = ("content.json",)
"""Files about keywords that may be checked in old drafts, and have no effect since 2019-09. They have none here."""


@pytest.fixture(scope="module")
def suite() -> Path:
    """Return the directory of the suite, which has one of tests for each draft."""
    release = f"jsonschema-{version('jsonschema')}"
    directory = Path(tempfile.gettempdir(), f"eagleray-{release}")
    if not directory.exists():
        with tempfile.TemporaryDirectory() as downloads:
            download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "jsonschema"]
            command = [*download, "--dest", downloads, release.replace("-", "==")]
            done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
            if done.returncode:
                pytest.skip(f"the source distribution of {release} cannot be downloaded: {done.stderr[-200:]}")
            with tarfile.open(Path(downloads, f"{release}.tar.gz")) as archive:
                archive.extractall(directory, filter="data")
    return directory / release / "json/tests"


@pytest.fixture(scope="module")
def xgrammar_walker() -> Iterator[Walker]:
    compilers: list[XGrammarCompiler] = []

    def make(*args: Any, **options: Any) -> XGrammarCompiler:
        compilers.append(XGrammarCompiler(*args, **options))
        return compilers[0]

    yield make_demo_walker(make)
    compilers[0].close()


@pytest.mark.parametrize("draft", DRAFTS)
def test_json_schema_suite_invalid_values_are_never_allowed(suite, draft):
    counts, wrong, missing = follow(demo_walker(), suite, draft)
    print(draft, dict(counts))
    assert wrong == []
    assert [name for name in missing if name not in STRICTER] == []
    assert counts["compiled"] > 100


@pytest.mark.parametrize("draft", DRAFTS)
def test_json_schema_suite_invalid_values_are_never_allowed_by_xgrammar(suite, xgrammar_walker, draft):
    counts, wrong, _ = follow(xgrammar_walker, suite, draft)
    print(draft, dict(counts))
    assert wrong == []
    assert counts["compiled"] > 30


def test_xgrammar_random_schemas_texts_validate(xgrammar_walker):
    num_checked = 0
    for seed in range(1000):
        schema = random_schema(seed)
        with suppress(InvalidRequest):
            grammar = xgrammar_walker.compile(json=json.dumps(schema))
            for text in filter(None, (xgrammar_walker.draw(grammar, draw) for draw in range(3))):
                assert schema_errors(schema, text) == [], f"seed {seed}: {text!r}"
                num_checked += 1
    assert num_checked > 300


def follow(walker: Walker, suite: Path, draft: str) -> tuple[Counter[str], list[tuple[str, ...]], list[str]]:
    """Follow all values of a draft. Returns counts, the invalid values that are allowed, and the files of valid values
    that are not."""
    counts: Counter[str] = Counter()
    wrong: list[tuple[str, ...]] = []
    missing: list[str] = []
    for path in sorted((suite / draft).rglob("*.json")):
        for case in json.loads(path.read_text()) if path.name not in ANNOTATIONS else ():
            schema = case["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": DRAFTS[draft]} | schema
            try:
                grammar = walker.compile(json=json.dumps(schema))
            except InvalidRequest:
                counts["refused"] += 1
                continue
            counts["compiled"] += 1
            for test in case["tests"]:
                value = without_fractions(test["data"]) if test["valid"] else test["data"]
                is_allowed = any(walker.accepts(grammar, text) for text in texts_of(value))
                counts[f"{'valid' if test['valid'] else 'invalid'}, {'allowed' if is_allowed else 'not allowed'}"] += 1
                if is_allowed and not test["valid"]:
                    wrong.append((path.name, case["description"], test["description"]))
                elif test["valid"] and not is_allowed:
                    missing.append(path.name)
    return counts, wrong, missing


def texts_of(value: Any) -> list[str]:
    """Return JSON texts of a value, which differ in the order of an object's properties."""
    if not isinstance(value, dict):
        return [json.dumps(value, ensure_ascii=False)]
    orders = islice(permutations(value.items()), MAX_ORDERS)
    return [json.dumps(dict(order), ensure_ascii=False) for order in orders]


def without_fractions(value: Any) -> Any:
    """Return the value with integers in place of whole numbers like 1.0, which are equal in JSON Schema."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= 2**53:
        return int(value)
    if isinstance(value, list):
        return [without_fractions(one) for one in value]
    if isinstance(value, dict):
        return {name: without_fractions(one) for name, one in value.items()}
    return value
