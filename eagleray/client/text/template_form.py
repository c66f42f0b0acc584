"""Determines the form in which a chat template takes messages, from its syntax. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jinja2 import nodes

ContentFormat = Literal["auto", "string", "openai"]
"""Form of contents in templates: `string`, texts; `openai`, lists of parts; `auto`, as the template uses them."""


class MessageForm(NamedTuple):
    """Form in which a template takes messages."""

    keeps_parts: bool = False
    """Whether contents that are lists of parts stay lists."""
    wraps_texts: bool = False
    """Whether contents that are texts become lists of one part."""
    has_empty_content: bool = False
    """Whether a content that is null or missing becomes an empty text."""
    has_text_arguments: bool = False
    """Whether the arguments of tool calls are JSON in texts, as in OpenAI's API, in place of objects."""
    knows_developer: bool = False
    """Whether the template has a case for the role `developer`."""


def message_form(tree: nodes.Template, source: str, content_format: ContentFormat) -> MessageForm:
    """Return the form of messages for the template of this syntax tree and source."""
    knows_developer = "developer" in source
    if content_format == "string":
        return MessageForm(knows_developer=knows_developer)
    loops = content_format == "openai" or _loops_over_content(tree)
    # Such a template can show both forms, and transformers would pass texts as they are.
    tests_texts = any(test.name == "string" for test in tree.find_all(nodes.Test))
    wraps = content_format == "openai" or (loops and not tests_texts)
    return MessageForm(keeps_parts=loops, wraps_texts=wraps, knows_developer=knows_developer)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether a loop's iterable is the content of a message, also by a variable that was set to it."""
    names = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, frozenset())
    }
    return any(_is_content(loop.iter, frozenset(names)) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: frozenset[str]) -> bool:
    match node:
        case nodes.Filter():
            return _is_content(node.node, names)
        case nodes.Getattr():
            return node.attr == "content"
        case nodes.Getitem():
            return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
        case nodes.Name():
            return node.name in names
        case _:
            return False
