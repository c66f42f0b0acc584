"""scripts/house.py: its counts of lines, classes, imports and odd docstrings, on small sources."""

from __future__ import annotations

import pytest
from house import MAX_CHAIN, ODD, Source, Tree, cycles, import_graph, is_odd, longest_chain, missed


def package(**modules: str) -> Tree:
    """Return a tree of modules with these texts."""
    return Tree("eagleray", [Source(f"eagleray/{name}.py", text) for name, text in modules.items()])


def docstrings_of(text: str) -> list[str]:
    return [node.value for node in Source("eagleray/a.py", text).docstrings()]


def imports_of(text: str, *, lazy: bool = False) -> set[str]:
    modules = {"eagleray", "eagleray.b", "eagleray.c", "eagleray.c.d"}
    return Source("eagleray/c/a.py", text).imports(modules, lazy=lazy)


def test_code_lines_leaves_out_blanks_comments_docstrings_imports_and_exports():
    text = '''"""A module
of two lines."""

import os
from sys import (
    argv,
)

__all__ = [
    "f",
]
# a comment


def f():
    """A docstring."""
    value = 1  # counted
    """An attribute's docstring."""
    return (
        value
    )
'''
    assert Source("a.py", text).code_lines() == 5


def test_docstrings_of_module_class_function_and_attribute_are_found():
    text = '''"""Module."""
LIMIT = 1
"""Constant."""
class A:
    """Class."""
    x: int
    """Field."""
    async def f(self):
        """Method."""
        self.y = 1
        """Attribute."""
'''
    assert sorted(docstrings_of(text)) == ["Attribute.", "Class.", "Constant.", "Field.", "Method.", "Module."]


def test_docstrings_other_strings_do_not_count():
    assert docstrings_of("def f():\n    g('x')\n    'no docstring'\n    return 'y'\nif f:\n    'nor this'\n") == []


@pytest.mark.parametrize(
    ("pattern", "odd", "fine"),
    [
        (0, "Of its inbox.", "Offer a row to the batch."),
        (1, "That engine computes it.", "Thatch."),
        (2, "Who waits.", "Whether the engine has work."),
        (3, "Nothing happens any more.", "Many rows are as long as this one."),
        (4, "Return what the worker said: what it is.", "Return what remains."),
        (5, "Every client who is late.", "The clients that are late."),
    ],
)
def test_patterns_match_the_odd_docstring_alone(pattern, odd, fine):
    assert ODD[pattern].search(odd)
    assert not is_odd(fine)


def test_patterns_each_has_an_example():
    (parameters,) = (mark.args[1] for mark in test_patterns_match_the_odd_docstring_alone.pytestmark)
    assert [pattern for pattern, _, _ in parameters] == list(range(len(ODD)))


def test_odd_docstring_phrase_broken_over_lines_is_found_with_its_line():
    (found,) = Source("a.py", '\n"""Stop when the wave is\nover."""\n').odd_docstrings()
    assert str(found) == "a.py:2: Stop when the wave is over."


def test_imports_every_form_resolves_to_a_module():
    assert imports_of("import eagleray.b") == {"eagleray.b"}
    assert imports_of("from eagleray import b") == {"eagleray.b"}
    assert imports_of("from eagleray.b import name") == {"eagleray.b"}
    assert imports_of("from . import d") == {"eagleray.c.d"}
    assert imports_of("from ..b import name") == {"eagleray.b"}
    assert imports_of("import os, torch.nn") == set()


def test_imports_of_a_package_face_are_relative_to_itself():
    modules = {"eagleray.c", "eagleray.c.d"}
    assert Source("eagleray/c/__init__.py", "from .d import x").imports(modules, lazy=False) == {"eagleray.c.d"}


def test_imports_inside_a_function_are_lazy():
    text = "class A:\n    def f(self):\n        with x:\n            from eagleray import b\n"
    assert imports_of(text) == set()
    assert imports_of(text, lazy=True) == {"eagleray.b"}


def test_imports_inside_try_and_class_run_at_module_level():
    text = "try:\n    pass\nexcept ImportError:\n    import eagleray.b\nclass A:\n    import eagleray.c.d\n"
    assert imports_of(text) == {"eagleray.b", "eagleray.c.d"}


def test_imports_for_type_checkers_do_not_count():
    text = "if TYPE_CHECKING:\n    import eagleray.b\nelse:\n    import eagleray.c.d\n"
    assert imports_of(text, lazy=True) == {"eagleray.c.d"}


def test_longest_chain_takes_the_longer_way():
    tree = package(
        a="import eagleray.b\nimport eagleray.d",
        b="import eagleray.c",
        c="import eagleray.d",
        d="",
        e="import eagleray.d",
    )
    assert longest_chain(tree.graph) == [f"eagleray.{name}" for name in "abcd"]


def test_lazy_import_lengthens_the_lazy_chain_alone():
    tree = package(a="import eagleray.b", b="def f():\n    import eagleray.c", c="")
    assert len(longest_chain(tree.graph)) == 2
    assert len(longest_chain(tree.lazy_graph)) == 3


def test_cycle_is_found_and_the_chain_below_it_still_ends():
    tree = package(
        a="import eagleray.b", b="import eagleray.c", c="def f():\n    import eagleray.b\nimport eagleray.d", d=""
    )
    assert cycles(tree.graph) == []
    assert cycles(tree.lazy_graph) == [["eagleray.b", "eagleray.c"]]
    assert len(longest_chain(tree.lazy_graph)) == 4


def test_import_graph_has_every_module():
    assert import_graph(
        [Source("eagleray/a.py", ""), Source("eagleray/__init__.py", "import eagleray.a")], lazy=False
    ) == {
        "eagleray.a": set(),
        "eagleray": {"eagleray.a"},
    }


def test_repeated_classes_are_listed_with_every_place():
    tree = package(a="class A: ...\nclass B: ...", b="class A: ...")
    assert tree.listing("classes") == ["eagleray/a.py:1: A", "eagleray/b.py:1: A"]
    assert len(tree.classes) == 3


def test_exports_of_a_package_face_are_not_internal():
    tree = package(a="x = 1\n__all__ = ['x']", b="__all__: list[str] = []")
    face = Source("eagleray/sub/__init__.py", "__all__ = []")
    tree = Tree("eagleray", [*tree.sources, face])
    assert tree.listing("exports") == ["eagleray/a.py:2: __all__", "eagleray/b.py:1: __all__"]


def test_missed_limits_each_get_a_sentence():
    chain = {f"m{number}": f"import eagleray.m{number + 1}" for number in range(MAX_CHAIN)}
    tree = package(
        **chain, **{f"m{MAX_CHAIN}": "", "a": "class A: ...\n__all__ = []", "b": '"""Of it."""\nclass A: ...'}
    )
    assert missed([tree]) == [
        "Class names are used twice: A.",
        f"The longest chain of imports has {MAX_CHAIN + 1} modules; the limit is {MAX_CHAIN}.",
        "100.0% of the docstrings in eagleray/ are no sentences; the limit is 4% "
        "(scripts/house.py --list docstrings eagleray).",
        "Internal modules of eagleray/ define __all__: 1, the first in eagleray/a.py, line 2.",
    ]


def test_missed_sizes_and_cycles_get_a_sentence(monkeypatch):
    monkeypatch.setattr("house.MAX_CODE_LINES", 1)
    monkeypatch.setattr("house.MAX_CLASSES", 0)
    tree = package(a="import eagleray.b\nclass A: ...\nx = 1", b="import eagleray.a")
    assert missed([tree]) == [
        "eagleray/ has 2 code lines; the limit is 1.",
        "eagleray/ has 1 classes; the limit is 0.",
        "Modules import each other: eagleray.a, eagleray.b.",
    ]


def test_missed_kinds_that_were_not_asked_for_are_left_out():
    tree = package(a="class A: ...\n__all__ = []", b="class A: ...")
    assert missed([tree], ["names"]) == ["Class names are used twice: A."]


def test_missed_limits_of_the_package_do_not_hold_for_tests():
    tests = Tree("tests", [Source(f"tests/{name}.py", '"""Of it."""\nclass A: ...') for name in "ab"])
    assert [sentence.partition(" ")[0] for sentence in missed([tests])] == ["100.0%"]


def test_missed_tree_within_the_limits_gets_none():
    tree = package(a="import eagleray.b\nclass A: ...", b='"""A module."""')
    assert missed([tree]) == []
