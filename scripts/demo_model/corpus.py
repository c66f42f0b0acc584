"""Running text for the embedded model: the standard library, eagleray's documentation, and lines typed at a prompt.

The standard library (sources, docstrings, comments, language reference; PSF licence) is on every machine with Python,
so the corpus can be made again without a download. One file in twenty is held out with everything made from it.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import io
import random
import re
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
NUM_SESSIONS = 1500

SKIPPED_DIRS = {"site-packages", "test", "tests", "idlelib", "turtledemo", "encodings", "pydoc_data", "_bundled"}
# Written in C, so their documentation is in no source file. Importing these has no side effect.
C_MODULES = ("builtins", "math", "cmath", "itertools", "time", "array", "zlib", "binascii")
# Where a module's names are known by another module's name.
KNOWN_AS = {"posixpath": "os.path", "genericpath": "os.path", "asyncio.": "asyncio", "unittest.case": "unittest"}


@dataclass(frozen=True)
class Entry:
    """Documented name of the standard library."""

    module: str
    name: str  # within its module; empty for the module itself
    signature: str
    doc: str

    @property
    def full_name(self) -> str:
        return f"{self.module}.{self.name}" if self.name and self.module != "builtins" else self.name or self.module

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.full_name.split("."))


@dataclass
class Corpus:
    """Texts of one side of the split, and the public names that they document. A file is on one side with all of it."""

    code: list[str] = field(default_factory=list)
    prose: list[str] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return lines of code and prose of a message's length, without questions."""
        lines = (line.strip() for text in self.code + self.prose for line in text.split("\n"))
        return sorted({line for line in lines if 20 < len(line) < 100 and not line.endswith("?")})


def is_held_out(name: str) -> bool:
    """Whether a file is held out: one in twenty, by its name alone, so that all machines with the same Python agree."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 20 == 0


def build_corpus() -> tuple[Corpus, Corpus]:
    """Return the training and the held-out side, in an order that depends on file names only."""
    train, held_out = Corpus(), Corpus()
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in library_files(root):
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 keeps files of other Python versions
        relative = path.relative_to(root)
        entries = list(documented_names(tree, ".".join(relative.with_suffix("").parts).removesuffix(".__init__")))
        side = held_out if is_held_out(relative.as_posix()) else train
        side.code.append(source)
        side.prose += [text for text in (reference_page(entries), comments(source)) if len(text) > 200]
        side.names += [entry.full_name for entry in entries if entry.is_public]
    for module in C_MODULES:
        entries = list(compiled_names(module))
        train.prose.append(reference_page(entries))
        train.names += [entry.full_name for entry in entries if entry.is_public]
    topics = ast.parse((root / "pydoc_data" / "topics.py").read_text(encoding="utf-8"))
    train.prose += ast.literal_eval(next(node.value for node in topics.body if isinstance(node, ast.Assign))).values()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        side = held_out if is_held_out(path.relative_to(ROOT).as_posix()) else train
        side.prose.append(path.read_text(encoding="utf-8"))
    train.prose += [session(random.Random(number)) for number in range(NUM_SESSIONS)]
    return train, held_out


def library_files(root: Path) -> Iterator[Path]:
    """Yield the source files of the standard library that people wrote, without tests."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        is_generated = "-" in str(relative)  # config-3.x and _sysconfigdata
        if not is_generated and not SKIPPED_DIRS.intersection(relative.parts) and path.stat().st_size >= 200:
            yield path


def documented_names(tree: ast.Module, module: str) -> Iterator[Entry]:
    """Yield everything in a source file that has a docstring, in its order. The file is parsed, never imported."""
    if doc := ast.get_docstring(tree):
        yield Entry(module, "", "", doc)
    module = next((name for start, name in KNOWN_AS.items() if module.startswith(start)), module)

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[Entry]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                if doc := ast.get_docstring(node):
                    yield Entry(module, prefix + node.name, "", doc)
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (doc := ast.get_docstring(node)):
                arguments = re.sub(r"^(self|cls)(, |$)", "", ast.unparse(node.args))
                yield Entry(module, prefix + node.name, f"({arguments})", doc)

    yield from walk(tree.body, "")


def compiled_names(module: str) -> Iterator[Entry]:
    """Yield the documented names of a module without a source file."""
    owner = import_module(module)
    yield Entry(module, "", "", inspect.getdoc(owner) or "")
    for name, value in sorted(vars(owner).items()):
        if name.startswith("_") or not callable(value) or not (doc := inspect.getdoc(value)):
            continue
        is_class = isinstance(value, type)
        yield Entry(module, name, "" if is_class else signature_of(value), doc)
        if is_class and not issubclass(value, BaseException):
            for part, method in sorted(vars(value).items()):
                if not part.startswith("_") and callable(method) and (doc := inspect.getdoc(method)):
                    yield Entry(module, f"{name}.{part}", signature_of(method), doc)


def signature_of(value: object) -> str:
    text = getattr(value, "__text_signature__", None) or ""
    return text.replace("$self, /, ", "").replace("$self, ", "").replace("$self", "").replace("$module, ", "")


def reference_page(entries: list[Entry]) -> str:
    return "\n\n".join(f"{entry.full_name}{entry.signature}\n\n{inspect.cleandoc(entry.doc)}" for entry in entries)


def comments(source: str) -> str:
    """Return the comment blocks of a file as paragraphs, without rulers, commented-out code and one-line remarks."""
    blocks: list[list[str]] = [[]]
    last_line = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last_line + 1:
            blocks.append([])
        blocks[-1].append(token.string.lstrip("#! "))
        last_line = token.start[0]
    paragraphs = (" ".join(block).strip() for block in blocks)
    return "\n\n".join(p for p in paragraphs if len(p) > 60 and sum(c.isalpha() or c == " " for c in p) > 0.85 * len(p))


WORDS = ("apple", "python", "ray", "list", "token", "spam", "eggs", "hello", "world", "model", "cache", "engine")


def session(rng: random.Random) -> str:
    """Return some lines typed at Python's prompt, with the values that Python shows for them."""
    expressions = [random_expression(rng) for _ in range(rng.randint(4, 10))]
    return "\n".join(f">>> {expression}\n{eval(expression)!r}" for expression in expressions)


def random_expression(rng: random.Random) -> str:
    """Return an expression of builtins whose value is short and the same on every machine."""
    word, other = rng.sample(WORDS, 2)
    a, b = rng.randint(0, 20), rng.randint(1, 12)
    numbers = [rng.randint(0, 9) for _ in range(rng.randint(2, 5))]
    return rng.choice([
        f"{a} {rng.choice(['+', '-', '*', '//', '%', '<', '>', '==', '!='])} {b}",
        f"{word!r} + {other!r}", f"{word!r}[{rng.randint(0, 2)}]", f"{word!r}[:{rng.randint(1, 4)}]",
        f"len({word!r})", f"{word!r}.upper()", f"{word!r}.title()", f"{word!r} in {[word, other]!r}",
        f"sorted({numbers})", f"sum({numbers})", f"max({numbers})", f"min({numbers})", f"len({numbers})",
        f"{numbers}[-1]", f"{numbers}[::-1]", f"[x * {b} for x in {numbers}]", f"list(range({b}))",
        f"{', '.join([word, other])!r}.split(', ')", f"' '.join({[word, other]!r})", f"str({a})", f"int('{a}')",
        f"{{{word!r}: {a}}}[{word!r}]", f"{{{word!r}: {a}}}.get({other!r}, 0)", f"bool({numbers})", f"not {a}",
        f"abs({a - 10})", f"divmod({a}, {b})", f"{word!r}.replace({word[0]!r}, {other[0]!r})", f"{word!r} == {other!r}",
    ])  # fmt: skip
