"""Facts that the embedded model learns by heart, read from the files in `facts/`.

A file has blocks of this form, divided by empty lines; lines that begin with `#` are comments:

    name json.dumps: turns an object into a string of ~JSON~.
    > json.dumps([1, None])
    ? turn an object into JSON | serialize a dictionary | Why is my string of JSON so long?

The first line has the kind, the subject, and the answer, before which some kinds repeat the subject. Words between
tildes are the keys: an answer is right only if it contains all of them. A line `>` has an expression that Python
evaluates for the example at the end of the answer. Lines `?` have goals (verb phrases) and whole questions, which end
with `?` or `.`; those of the kind `talk` are all whole.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

FACTS_DIR = Path(__file__).parent / "facts"

# Kinds whose answers are predicates of the subject; those of the others are whole sentences.
KINDS_WITH_PREDICATES = ("name", "module", "keyword", "flag", "route")

# Modules that examples may use, as names of their own.
EXAMPLE_MODULES = (
    "base64", "bisect", "collections", "copy", "datetime", "decimal", "difflib", "fractions", "functools", "hashlib",
    "heapq", "html", "ipaddress", "itertools", "json", "math", "operator", "os", "pathlib", "random", "re", "shlex",
    "statistics", "string", "struct", "textwrap", "types", "urllib",
)  # fmt: skip


@dataclass(frozen=True)
class Fact:
    """Answer with everything from which its questions are made. `topic` is python, eagleray or talk."""

    topic: str
    kind: str
    subject: str
    answer: str
    keys: tuple[str, ...]
    example: str
    goals: tuple[str, ...]
    questions: tuple[str, ...]


@cache
def load_facts() -> tuple[Fact, ...]:
    """Return the facts of all files, in the order of the files' names."""
    return tuple(fact for path in sorted(FACTS_DIR.glob("*.txt")) for fact in read_facts(path))


def choose_facts(limit: int | None = None) -> list[Fact]:
    """Return all facts, or `limit` of them for a short trial."""
    facts = load_facts()
    return random.Random(0).sample(facts, min(limit or len(facts), len(facts)))


def read_facts(path: Path) -> list[Fact]:
    """Read a file of facts. The part of its name before `_` is the topic."""
    lines = (line for line in path.read_text(encoding="utf-8").split("\n") if not line.startswith("#"))
    blocks = "\n".join(lines).strip().split("\n\n")
    return [parse_fact(path.stem.partition("_")[0], block.strip("\n").split("\n")) for block in blocks if block.strip()]


def parse_fact(topic: str, lines: list[str]) -> Fact:
    """Parse one block. Raises ValueError for a line of an unknown form."""
    head, _, text = lines[0].partition(": ")
    kind, _, subject = head.partition(" ")
    if not subject or not text:
        raise ValueError(f"expected `kind subject: answer`: {lines[0]!r}")
    example, phrases = "", []
    for line in lines[1:]:
        mark, _, rest = line.partition(" ")
        if mark == ">":
            example = rest
        elif mark == "?":
            phrases += [phrase.strip() for phrase in rest.split(" | ")]
        else:
            raise ValueError(f"expected a line that begins with > or ?: {line!r}")
    is_question = [kind == "talk" or phrase.endswith(("?", ".")) for phrase in phrases]
    return Fact(
        topic=topic,
        kind=kind,
        subject=subject,
        answer=make_answer(kind, subject, text.replace("~", ""), example),
        keys=tuple(re.findall(r"~([^~]+)~", text)),
        example=example,
        goals=tuple(phrase for phrase, whole in zip(phrases, is_question, strict=True) if not whole),
        questions=tuple(phrase for phrase, whole in zip(phrases, is_question, strict=True) if whole),
    )


def make_answer(kind: str, subject: str, text: str, example: str) -> str:
    """Return whole sentences: with the subject before a predicate, and with the value of the example behind."""
    if kind in KINDS_WITH_PREDICATES:
        text = f"`{subject}` {text}"
    return f"{text} For example, `{example}` is `{evaluate(example)}`." if example else text


def evaluate(expression: str) -> str:
    """Return what Python's prompt shows for an expression of builtins and modules."""
    names = set(re.findall(r"\b([a-z_0-9]+)\.", expression)).intersection(EXAMPLE_MODULES)
    return repr(eval(expression, {name: import_module(name) for name in sorted(names)}))
