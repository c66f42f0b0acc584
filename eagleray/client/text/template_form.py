"""Determines the form in which a chat template takes messages, from its syntax. Pure."""

from __future__ import annotations

from typing import Literal, NamedTuple

from jinja2 import nodes

ContentFormat = Literal["auto", "string", "openai"]
"""Form of contents in templates: `string`, texts; `openai`, lists of parts; `auto`, as the template uses them."""


class MessageForm(NamedTuple):
    """Form in which a template takes messages and tools."""

    keeps_parts: bool = False
    """Whether contents that are lists of parts stay lists."""
    wraps_texts: bool = False
    """Whether contents that are texts become lists of one part."""
    has_empty_content: bool = False
    """Whether a content that is null or missing becomes an empty text."""
    tests_null_content: bool = False
    """Whether the template asks if a content is null. Others would show a null as the word None."""
    has_text_arguments: bool = False
    """Whether the arguments of tool calls are JSON in texts, as in OpenAI's API, in place of objects."""
    has_single_calls: bool = False
    """Whether the template shows the first tool call of a message only."""
    has_function_ids: bool = False
    """Whether the template shows the id of a tool call in place of the function's name, as Kimi K2's do."""
    joins_reasoning: bool = False
    """Whether the content beside tool calls is a part of the reasoning."""
    has_descriptions: bool = False
    """Whether tools without a description have an empty one."""
    knows_developer: bool = False
    """Whether the template has a case for the role `developer`."""


def message_form(tree: nodes.Template, source: str, content_format: ContentFormat) -> MessageForm:
    """Return the form of messages for the template of this syntax tree and source."""
    content = _Entry(tree, "content")
    form = MessageForm(
        tests_null_content=any(test.name == "none" and content.is_read_by(test.node) for test in _tests(tree)),
        has_text_arguments=_joins_arguments(tree),
        has_single_calls=_shows_first_call(tree),
        has_function_ids="<|tool_call_argument_begin|>" in source,
        knows_developer="developer" in source,
    )
    if content_format == "string":
        return form
    loops = content_format == "openai" or any(content.is_read_by(loop.iter) for loop in tree.find_all(nodes.For))
    # Such a template can show both forms, and transformers would pass texts as they are.
    tests_texts = any(test.name == "string" for test in _tests(tree))
    wraps = content_format == "openai" or (loops and not tests_texts)
    return form._replace(keeps_parts=loops, wraps_texts=wraps)


class _Entry:
    """Finds where a template reads an entry of a mapping, also by a variable that was set to it."""

    def __init__(self, tree: nodes.Template, name: str) -> None:
        self._name = name
        self._aliases = {
            assign.target.name
            for assign in tree.find_all(nodes.Assign)
            if isinstance(assign.target, nodes.Name) and self._is_entry(assign.node)
        }

    def is_read_by(self, node: nodes.Node) -> bool:
        """Whether an expression is the entry, perhaps through filters."""
        while isinstance(node, nodes.Filter) and node.node is not None:
            node = node.node
        return self.is_given_by(node)

    def is_given_by(self, node: nodes.Node) -> bool:
        """Whether an expression is the entry itself."""
        return self._is_entry(node) or (isinstance(node, nodes.Name) and node.name in self._aliases)

    def _is_entry(self, node: nodes.Node) -> bool:
        match node:
            case nodes.Getattr():
                return node.attr == self._name
            case nodes.Getitem():
                return isinstance(node.arg, nodes.Const) and node.arg.value == self._name
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=name), *_]):
                return bool(name == self._name)
            case _:
                return False


def _joins_arguments(tree: nodes.Template) -> bool:
    """Whether the template writes the arguments of calls as they are, without a test of their type."""
    arguments = _Entry(tree, "arguments")
    if any(test.name in ("string", "mapping") and arguments.is_read_by(test.node) for test in _tests(tree)):
        return False
    written = [node for output in tree.find_all(nodes.Output) for node in output.nodes]
    written += [side for sum_ in tree.find_all(nodes.Add) for side in (sum_.left, sum_.right)]
    written += [node for joined in tree.find_all(nodes.Concat) for node in joined.nodes]
    return any(arguments.is_given_by(node) for node in written)


def _shows_first_call(tree: nodes.Template) -> bool:
    """Whether the template takes the first of a message's calls by its index, and has no loop over them."""
    calls = _Entry(tree, "tool_calls")
    takes_first = any(
        isinstance(item.arg, nodes.Const) and item.arg.value == 0 and calls.is_given_by(item.node)
        for item in tree.find_all(nodes.Getitem)
    )
    return takes_first and not any(calls.is_read_by(loop.iter) for loop in tree.find_all(nodes.For))


def _tests(tree: nodes.Template) -> list[nodes.Test]:
    return list(tree.find_all(nodes.Test))
