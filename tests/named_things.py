"""Reader of the names in Markdown files: paths, symbols, options, metrics, make targets; and whether they exist.

Names are those in code spans and code blocks. The code is parsed, never imported.
"""

from __future__ import annotations

import ast
import builtins
import fnmatch
import re
import sys
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FOLDERS = ("eagleray", "deploy", "bench", "scripts", "benchmarks", "tests", "docs", "examples")
OPTION_FILES = ("config/sections.py", "config/serving.py", "config/observability.py")
"""Modules whose fields are options."""
FLAG_TABLE = "eagleray/config/vllm_table.py"
"""Module whose texts name options of vLLM."""

FENCE = re.compile(r"^```.*?^```", re.M | re.S)
INDENTED = re.compile(r"(?<=\n\n)(?: {4}.*\n)+")
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
HEADING = re.compile(r"^#{1,6} (.*)$", re.M)
LINKED = re.compile(r"\[([^\]]*)\]\([^)]*\)")

FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
VARIABLE = re.compile(r"\bEAGLERAY_\w+")
METRIC = re.compile(r"\beagleray:(\w+)")
TARGET = re.compile(r"\bmake ([a-z][a-z0-9-]*)")
FILE = re.compile(r"(?<![\w./~:-])[\w<>*][\w./<>*-]*\.(?:py|h|cpp|mjs|md|toml|json|svg|yaml|yml)\b")
FOLDER = re.compile(r"[a-z0-9_]+(?:/[a-z0-9_]+)*/…?|[a-z0-9_]+(?:/[a-z0-9_]+)+")
NAME = re.compile(r"((?:[a-z_]+/)*[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(.*\))?")
CLASS = re.compile(r"\b[A-Z][a-z0-9]+[A-Z]\w*\b")


@dataclass(frozen=True)
class Mention:
    """A code span or block, at a line of a document."""

    document: str
    line: int
    text: str
    is_block: bool = False


@dataclass(frozen=True)
class Stale:
    """A name in a document that neither a file nor a definition has."""

    mention: Mention
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.mention.document}:{self.mention.line}: there is no {self.kind} {self.name}"


def mentions(document: str, text: str) -> Iterator[Mention]:
    """Yield the lines of code blocks, then the code spans outside of them."""
    for pattern in (FENCE, INDENTED):
        for block in pattern.finditer(text):
            first = _line(text, block.start())
            for number, line in enumerate(block[0].splitlines(), first):
                yield Mention(document, number, line, is_block=True)
        text = pattern.sub(lambda block: re.sub(r"[^\n]", " ", block[0]), text)
    for span in SPAN.finditer(text):
        yield Mention(document, _line(text, span.start()), " ".join(span[1].split()))


def _line(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1


@dataclass(frozen=True)
class Link:
    """Link to a file, or to a heading of this or another document; without `target` it is this one."""

    line: int
    target: str
    anchor: str | None


def links(text: str) -> Iterator[Link]:
    """Yield the links of a document, without those to other sites."""
    for link in LINK.finditer(text):
        if "://" not in link[1]:
            yield Link(_line(text, link.start()), link[1], link[2])


NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
"""Nodes that are named by a field of their own."""


def anchors(text: str) -> set[str]:
    """Return the anchors that code hosts give to the headings of a document."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        plain = LINKED.sub(r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        found[anchor] = found.get(anchor, -1) + 1
    return {f"{anchor}-{number}" if number else anchor for anchor, last in found.items() for number in range(last + 1)}


def make_targets(root: Path) -> set[str]:
    """Return the targets of the Makefile in `root`."""
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (root / "Makefile").read_text("utf-8"), re.M))


class Code:
    """The names that the files below `root` define and use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.flags: set[str] = set()
        self._classes: defaultdict[str, set[str]] = defaultdict(set)
        """Members of each class, by its name; of classes with the same name, the members of all."""
        self._bases: defaultdict[str, set[str]] = defaultdict(set)
        self._defined: defaultdict[str, set[str]] = defaultdict(set)
        """Functions, classes, variables and attributes by the module that defines them, as `eagleray/llm.py`."""
        self._used: set[str] = set()
        """Every identifier; lint and type checks make sure that it exists where it is used."""
        self._words: set[str] = set()
        """Words of strings and of configuration files, but not of docstrings, comments and tests."""
        self._metrics: set[str] = set()
        """Every string of the metrics' modules, without the prefix."""
        self._libraries: set[str] = set(sys.stdlib_module_names)
        for path in self.files:
            self._read(path)

    @cached_property
    def files(self) -> list[str]:
        """Every file, relative to the root."""
        top = [path for path in self.root.iterdir() if path.is_file()]
        below = [path for name in FOLDERS for path in (self.root / name).rglob("*")]
        kept = (path.relative_to(self.root) for path in (*top, *below) if path.is_file())
        return sorted(str(path) for path in kept if "__pycache__" not in path.parts)

    @cached_property
    def targets(self) -> set[str]:
        return make_targets(self.root)

    @cached_property
    def _folders(self) -> set[str]:
        return {str(parent) for path in self.files for parent in Path(path).parents}

    def _read(self, path: str) -> None:
        if path.endswith(".py"):
            self._read_module(path, (self.root / path).read_text("utf-8"))
        elif path.endswith((".cpp", ".h", ".mjs", ".toml", ".yaml", ".yml", "Dockerfile")):
            text = re.sub(r"(//|#).*", "", (self.root / path).read_text("utf-8"))
            self._words.update(re.findall(r"\w+", text))
            self._used.update(re.findall(r"\b(?:class|struct) (\w+)", text))

    def _read_module(self, path: str, text: str) -> None:
        tree = ast.parse(text, path)
        docstrings: set[int] = set()
        for node in _walk(tree):
            if isinstance(node, ast.Expr):
                docstrings.add(id(node.value))  # which comes after its parent
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if id(node) not in docstrings and not path.startswith("tests/"):
                    self._words.update(re.findall(r"\w+", node.value))
                    self.flags.update(FLAG.findall(node.value))
                    if path == FLAG_TABLE:
                        self.flags.update(f"--{word.replace('_', '-')}" for word in node.value.split())
                if path.startswith("eagleray/metrics/"):
                    self._metrics.add(node.value.removeprefix("eagleray:"))
            elif isinstance(node, ast.ClassDef):
                self._read_class(node, has_options=path.endswith(OPTION_FILES))
            elif isinstance(node, ast.Import):
                self._libraries.update(alias.asname or alias.name for alias in node.names)
            self._defined[path].update(_defined(node))
            self._used.update(_used(node))
        self._used |= self._defined[path]

    def _read_class(self, node: ast.ClassDef, *, has_options: bool) -> None:
        self._classes[node.name].update(name for child in _walk(node) for name in _defined(child))
        self._bases[node.name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        if has_options:
            fields = [ast.unparse(child.target) for child in node.body if isinstance(child, ast.AnnAssign)]
            self.flags.update(f"--{prefix}{name.replace('_', '-')}" for name in fields for prefix in ("", "no-"))

    def has_path(self, pattern: str) -> bool:
        """Whether a file, or a folder if it ends in a slash, has this path, from the root or from another folder."""
        pattern = re.sub(r"<\w+>", "*", pattern)
        names: Iterable[str] = self._folders if pattern.endswith("/") else self.files
        pattern = pattern.removesuffix("/").removeprefix("./")
        return any(fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, f"*/{pattern}") for name in names)

    def has_metric(self, name: str) -> bool:
        return name in self._metrics or re.sub(r"_(total|bucket|sum|count)$", "", name) in self._metrics

    def has_word(self, name: str) -> bool:
        return name in self._used or name in self._words or hasattr(builtins, name)

    def has_variable(self, name: str) -> bool:
        """Whether a variable of ours is read, or stands for an option."""
        return self.has_word(name) or f"--{name.removeprefix('EAGLERAY_').lower().replace('_', '-')}" in self.flags

    def has_name(self, name: str) -> bool:
        """Whether code has `name`: a word, a class, `Class.member`, `module.name`, `package/module.name`."""
        owner, _, member = name.rpartition(".")
        if not owner:
            is_class = name[0].isupper() and not name.isupper()
            return name in self._used or hasattr(builtins, name) if is_class else self.has_word(name)
        if owner.partition(".")[0] in self._libraries:
            return True
        owner = owner.rpartition(".")[2]
        if owner in self._classes:
            return member in self._members(owner)
        if modules := self._modules(owner):
            return any(member in self._defined[module] for module in modules) or bool(
                self._modules(f"{owner}/{member}")
            )
        return self.has_word(owner) and self.has_word(member)

    def _members(self, name: str) -> set[str]:
        inherited = (self._members(base) for base in self._bases[name] if base in self._classes)
        return self._classes[name].union(*inherited)

    def _modules(self, name: str) -> list[str]:
        """Return the paths of the modules of this name, and of all modules in packages of this name."""
        return [path for path in self._defined if path.endswith(f"/{name}.py") or f"/{name}/" in f"/{path}"]


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all below it, parents first. `ast.walk` takes twice the time, half of it for `Load`."""
    nodes = deque([tree])
    while nodes:
        node = nodes.popleft()
        yield node
        for field, value in node.__dict__.items():
            if isinstance(value, list):
                nodes.extend([item for item in value if isinstance(item, ast.AST)])
            elif isinstance(value, ast.AST) and field != "ctx":
                nodes.append(value)


def _defined(node: ast.AST) -> list[str]:
    """Return the names that a node defines: of a function, class, parameter, variable or attribute."""
    if isinstance(node, NAMED):
        return [node.name]
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return [node.id]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return [node.attr]
    if isinstance(node, ast.arg):
        return [node.arg]
    return []


def _used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return [node.name.rpartition(".")[2]]
    return []


def stale_names(mention: Mention, code: Code, foreign: Container[str] = ()) -> Iterator[Stale]:
    """Yield each name of a mention that neither the repository nor `foreign`, the names of others, has."""
    text = mention.text
    checks = [
        ("option", FLAG.findall(text), code.flags.__contains__),
        ("variable", VARIABLE.findall(text), code.has_variable),
        ("metric", METRIC.findall(text), code.has_metric),
        ("make target", TARGET.findall(text), code.targets.__contains__),
        ("file", FILE.findall(text), code.has_path),
    ]
    if mention.is_block:
        checks.append(("class", CLASS.findall(text), code.has_word))
    elif FOLDER.fullmatch(text):
        checks.append(("folder", [text.rstrip("…/") + "/"], code.has_path))
    elif (name := NAME.fullmatch(text)) and not FILE.fullmatch(text):
        checks.append(("name", [name[1]], code.has_name))
    for kind, names, exists in checks:
        for found in names:
            if found not in foreign and not exists(found):
                yield Stale(mention, kind, found)
