"""Counts that hold the shape of the code: its size, its classes, its imports and the language of its docstrings.

    python scripts/house.py                                      every count of every tree
    python scripts/house.py --list docstrings eagleray/client    each offender below a path, as file:line
    python scripts/house.py --check                              fail with a sentence for each missed limit
    python scripts/house.py --check cycles chain                 the same for some of the limits

A code line is a line that is not blank and holds more than a comment, a docstring, an import or `__all__`.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

MAX_CODE_LINES = 17_000
MAX_CLASSES = 400
MAX_CHAIN = 18
"""Modules in the longest chain of imports, lazy imports included."""
MAX_ODD_DOCSTRINGS = 0.04

PACKAGE = "eagleray"
TREES = (PACKAGE, "bench", "tests", "scripts", "benchmarks")
CHECKED_DOCSTRINGS = (PACKAGE, "bench", "tests", "scripts")

ODD = tuple(
    re.compile(pattern)
    for pattern in (
        r"^(Of|By|With|In|For|From|To|As|Until|Unless|Between|Beyond|Behind|Above)\s",
        r"^(It|They|Its|Their|That|Those|This one|One)\s",
        r"^(What|Who|Whom|Whose|Which|Where|Why|How|When)\b",
        r"is over|there is none|are none|any more|\bshall\b|\bwhom\b|as many as|so many",
        r"\b[Ww]hat (it|is|of|they|was|were|comes|came|others|that|this|an?|the)\b",
        r"those that|those who|\bwho (is|has|are|wants|waits|does)\b",
    )
)
"""Beginnings and phrases of docstrings that are no English sentences, searched in the text on one line."""

Graph = dict[str, set[str]]

FOREIGN_NAMES = "/compat/"
"""Part of the paths of modules whose classes and exports have the names of another project."""


@dataclass(frozen=True)
class Found:
    """A place in a file, and the text to print beside it."""

    path: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}"


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        return list(ast.walk(self.tree))

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def docstrings(self) -> Iterator[ast.Constant]:
        """Yield each docstring of a module, class or function, and each string after the assignment it describes."""
        for node in self.nodes:
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                if isinstance(body, list):
                    yield from _docstrings_in(node, body)

    def odd_docstrings(self) -> list[Found]:
        joined = ((node.lineno, " ".join(str(node.value).split())) for node in self.docstrings())
        return [Found(self.path, line, text) for line, text in joined if is_odd(text)]

    def code_lines(self) -> int:
        lines = self.text.splitlines()
        written = {number for number, line in enumerate(lines, 1) if line.strip() and not line.lstrip().startswith("#")}
        return len(written - self._lines_without_code())

    def _lines_without_code(self) -> set[int]:
        imports = [node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        skipped: list[ast.stmt | ast.expr] = [*imports, *self.docstrings(), *self._exports()]
        return {line for node in skipped for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}

    def _exports(self) -> list[ast.stmt]:
        """Return the statements that assign `__all__`."""
        return [node for node in self.tree.body if any(name.id == "__all__" for name in _assigned_names(node))]

    def exports(self) -> list[Found]:
        return [Found(self.path, node.lineno, "__all__") for node in self._exports()]

    def classes(self) -> list[Found]:
        return [Found(self.path, node.lineno, node.name) for node in self.nodes if isinstance(node, ast.ClassDef)]

    def imports(self, modules: set[str], *, lazy: bool) -> set[str]:
        """Return the modules of `modules` that this one imports; imports for type checkers alone do not count."""
        found: set[str] = set()
        for node in _executed(self.tree.body, lazy=lazy):
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                names = [f"{base}.{alias.name}" for alias in node.names]
                found.update(name if name in modules else base for name in names)
        return (found & modules) - {self.module}

    def _base(self, node: ast.ImportFrom) -> str:
        """Return the full name of the module after `from`."""
        if not node.level:
            return node.module or ""
        package = self.module.split(".") if self.path.endswith("__init__.py") else self.module.split(".")[:-1]
        return ".".join(package[: len(package) - node.level + 1] + ([node.module] if node.module else []))


def _docstrings_in(node: ast.AST, body: list[ast.stmt]) -> Iterator[ast.Constant]:
    has_own = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    for index, statement in enumerate(body):
        if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)):
            continue
        is_first = index == 0 and has_own and body is getattr(node, "body", None)
        is_after_attribute = index > 0 and isinstance(body[index - 1], ast.Assign | ast.AnnAssign)
        if isinstance(statement.value.value, str) and (is_first or is_after_attribute):
            yield statement.value


def _assigned_names(node: ast.stmt) -> list[ast.Name]:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target for target in targets if isinstance(target, ast.Name)]


def _executed(body: Iterable[ast.stmt], *, lazy: bool) -> Iterator[ast.stmt]:
    """Yield every statement that runs on import or, with `lazy`, later; `if TYPE_CHECKING` never runs."""
    for node in body:
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not lazy:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _executed(node.orelse, lazy=lazy)
            continue
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from _executed([child], lazy=lazy)
            elif isinstance(child, ast.ExceptHandler | ast.match_case):
                yield from _executed(child.body, lazy=lazy)


def is_odd(docstring: str) -> bool:
    """Whether a docstring, joined to one line, matches one of the patterns."""
    return any(pattern.search(docstring) for pattern in ODD)


def import_graph(sources: Iterable[Source], *, lazy: bool) -> Graph:
    """Return the modules that each module imports; an import of a package's name counts as one of its `__init__`."""
    by_module = {source.module: source for source in sources}
    return {module: source.imports(set(by_module), lazy=lazy) for module, source in by_module.items()}


def knots(graph: Graph) -> list[list[str]]:
    """Return the strongly connected modules, callees first (Tarjan); a knot of two or more is a cycle."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for imported in sorted(graph[module]):
            if imported not in order:
                visit(imported)
            if imported in stack:
                low[module] = min(low[module], low[imported])
        if low[module] == order[module]:
            start = stack.index(module)
            found.append(sorted(stack[start:]))
            del stack[start:]

    for module in sorted(graph):
        if module not in order:
            visit(module)
    return found


def cycles(graph: Graph) -> list[list[str]]:
    return [knot for knot in knots(graph) if len(knot) > 1]


def longest_chain(graph: Graph) -> list[str]:
    """Return the longest chain of modules of which each imports the next; a cycle counts with all its modules."""
    best: dict[str, list[str]] = {}
    for knot in knots(graph):
        below = [best[imported] for module in knot for imported in sorted(graph[module] - set(knot))]
        chain = knot + max(below, key=len, default=[])
        best.update(dict.fromkeys(knot, chain))
    return max(best.values(), key=len, default=[])


@dataclass(frozen=True)
class Tree:
    """The sources below one folder of the repository."""

    name: str
    sources: list[Source]

    @cached_property
    def code_lines(self) -> int:
        return sum(source.code_lines() for source in self.sources)

    @cached_property
    def classes(self) -> list[Found]:
        return [found for source in self.sources for found in source.classes()]

    @cached_property
    def repeated_classes(self) -> dict[str, list[Found]]:
        by_name: defaultdict[str, list[Found]] = defaultdict(list)
        for found in self.classes:
            if FOREIGN_NAMES not in found.path:
                by_name[found.text].append(found)
        return {name: places for name, places in sorted(by_name.items()) if len(places) > 1}

    @cached_property
    def num_docstrings(self) -> int:
        return sum(1 for source in self.sources for _ in source.docstrings())

    @cached_property
    def odd_docstrings(self) -> list[Found]:
        return [found for source in self.sources for found in source.odd_docstrings()]

    @property
    def odd_share(self) -> float:
        return len(self.odd_docstrings) / max(self.num_docstrings, 1)

    @cached_property
    def internal_exports(self) -> list[Found]:
        """Every `__all__` outside an `__init__.py`, except in modules that have the names of another project."""
        inner = (
            source
            for source in self.sources
            if not source.path.endswith("__init__.py") and FOREIGN_NAMES not in source.path
        )
        return [found for source in inner for found in source.exports()]

    @cached_property
    def graph(self) -> Graph:
        return import_graph(self.sources, lazy=False)

    @cached_property
    def lazy_graph(self) -> Graph:
        return import_graph(self.sources, lazy=True)

    def report(self) -> str:
        lengths = sorted(len(source.text.splitlines()) for source in self.sources)
        p90 = lengths[int(0.9 * (len(lengths) - 1))]
        rows = [
            f"{self.name}/",
            f"  code lines          {self.code_lines:,} of {sum(lengths):,}",
            f"  files               {len(lengths)}; lines: median {statistics.median(lengths):g}, p90 {p90}, "
            f"max {lengths[-1]}",
            f"  classes             {len(self.classes)}; names used twice: {len(self.repeated_classes)}",
            f"  docstrings          {self.num_docstrings}; odd: {len(self.odd_docstrings)} ({self.odd_share:.1%})",
            f"  internal __all__    {len(self.internal_exports)}",
        ]
        if self.name == PACKAGE:
            rows += [
                f"  longest chain       {len(longest_chain(self.graph))}; "
                f"with lazy imports: {len(longest_chain(self.lazy_graph))}",
                f"  import cycles       {len(cycles(self.graph))}; with lazy imports: {len(cycles(self.lazy_graph))}",
            ]
        return "\n".join(rows)

    def listing(self, kind: str) -> list[str]:
        """Return one line for each offender of that kind."""
        if kind == "docstrings":
            return [str(found) for found in self.odd_docstrings]
        if kind == "classes":
            return [str(found) for places in self.repeated_classes.values() for found in places]
        if kind == "exports":
            return [str(found) for found in self.internal_exports]
        if self.name != PACKAGE:
            return []
        if kind == "cycles":
            return [" -> ".join([*cycle, cycle[0]]) for cycle in cycles(self.lazy_graph)]
        paths = {source.module: source.path for source in self.sources}
        return [f"{paths[module]}:1: {place}" for place, module in enumerate(longest_chain(self.lazy_graph), 1)]


LISTS = ("docstrings", "classes", "cycles", "chain", "exports")


def _missed_size(package: Tree) -> Iterator[str]:
    if package.code_lines > MAX_CODE_LINES:
        yield f"{package.name}/ has {package.code_lines:,} code lines; the limit is {MAX_CODE_LINES:,}."


def _missed_classes(package: Tree) -> Iterator[str]:
    if len(package.classes) > MAX_CLASSES:
        yield f"{package.name}/ has {len(package.classes)} classes; the limit is {MAX_CLASSES}."


def _missed_names(package: Tree) -> Iterator[str]:
    if package.repeated_classes:
        yield f"Class names are used twice: {', '.join(package.repeated_classes)}."


def _missed_chain(package: Tree) -> Iterator[str]:
    if len(chain := longest_chain(package.lazy_graph)) > MAX_CHAIN:
        yield f"The longest chain of imports has {len(chain)} modules; the limit is {MAX_CHAIN}."


def _missed_cycles(package: Tree) -> Iterator[str]:
    for cycle in cycles(package.lazy_graph):
        yield f"Modules import each other: {', '.join(cycle)}."


def _missed_docstrings(tree: Tree) -> Iterator[str]:
    if tree.odd_share > MAX_ODD_DOCSTRINGS:
        yield (
            f"{tree.odd_share:.1%} of the docstrings in {tree.name}/ are no sentences; the limit is "
            f"{MAX_ODD_DOCSTRINGS:.0%} (scripts/house.py --list docstrings {tree.name})."
        )


def _missed_exports(tree: Tree) -> Iterator[str]:
    if tree.internal_exports:
        first = tree.internal_exports[0]
        yield (
            f"Internal modules of {tree.name}/ define __all__: {len(tree.internal_exports)}, "
            f"the first in {first.path}, line {first.line}."
        )


CHECKS: dict[str, tuple[Callable[[Tree], Iterator[str]], tuple[str, ...]]] = {
    "size": (_missed_size, (PACKAGE,)),
    "classes": (_missed_classes, (PACKAGE,)),
    "names": (_missed_names, (PACKAGE,)),
    "chain": (_missed_chain, (PACKAGE,)),
    "cycles": (_missed_cycles, (PACKAGE,)),
    "docstrings": (_missed_docstrings, CHECKED_DOCSTRINGS),
    "exports": (_missed_exports, TREES),
}
"""Each limit with the trees that it holds for."""


def missed(trees: Iterable[Tree], kinds: Iterable[str] = tuple(CHECKS)) -> list[str]:
    """Return one sentence for each limit of these kinds that a tree exceeds."""
    checks = [CHECKS[kind] for kind in kinds]
    return [sentence for tree in trees for check, names in checks if tree.name in names for sentence in check(tree)]


def read_tree(root: Path, name: str) -> Tree:
    paths = sorted(path for path in (root / name).rglob("*.py") if "__pycache__" not in path.parts)
    return Tree(name, [Source(str(path.relative_to(root)), path.read_text("utf-8")) for path in paths])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--list", choices=[*LISTS, "all"], help="print each offender of a kind, or of all kinds")
    parser.add_argument("--check", nargs="*", choices=CHECKS, help="fail where one of these limits, or any, is missed")
    parser.add_argument("paths", nargs="*", help="list only what lies below these paths")
    args = parser.parse_args(arguments)
    root = Path(__file__).resolve().parents[1]
    trees = [tree for name in TREES if (tree := read_tree(root, name)).sources]
    if args.list:
        kinds = LISTS if args.list == "all" else (args.list,)
        lines = (line for tree in trees for kind in kinds for line in tree.listing(kind))
        print(*(line for line in lines if not args.paths or line.startswith(tuple(args.paths))), sep="\n")
    elif args.check is None:
        print(*(tree.report() for tree in trees), sep="\n\n")
    if args.check is None:
        return 0
    sentences = missed(trees, args.check or CHECKS)
    print(*sentences, sep="\n", file=sys.stderr)
    return 1 if sentences else 0


if __name__ == "__main__":
    sys.exit(main())
