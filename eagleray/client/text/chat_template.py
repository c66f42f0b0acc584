"""Renders the messages of a conversation as the text of a prompt, with the checkpoint's chat template.

A template is a Jinja program that comes with a checkpoint. It is untrusted code: it runs in Jinja's sandbox, sees plain
data, and its exceptions become `InvalidRequest`. Its globals and filters are those of transformers. A `RenderBudget`
bounds the time that it takes and the text that it writes.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import threading
import time
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from eagleray.client.text.call_history import arrange_calls
from eagleray.client.text.conversation import (
    check_messages,
    has_call_with_reasoning_and_content,
    lacks_description,
    template_message,
    template_tools,
)
from eagleray.client.text.template_form import ContentFormat, MessageForm, message_form
from eagleray.config.json_files import read_bounded, shown
from eagleray.errors import CheckpointError, ConfigError, InvalidRequest

END_OF_TEXT = "CONTINUE_FINAL_MESSAGE_TAG "
"""Appended to the last message to find its end in the rendered text. The space shows whether texts are trimmed."""


MAX_GIVEN_TEMPLATES = 16
"""Number of templates of requests that are kept in compiled form."""

MAX_TEMPLATE_BYTES = 2**22
"""Size limit of the file of a template. Those of published models have up to 20 KiB."""

MAX_PRODUCT = 2**20
"""Largest length of a text or list that a template may make by repetition, and of a number in bits."""


class OverBudget(Exception):
    """Raised when a rendering exceeds its budget, or was cancelled."""


class RenderBudget:
    """Limits of one rendering: `seconds` from now on, and `max_chars` of output. Any thread may cancel it."""

    def __init__(self, *, seconds: float, max_chars: int) -> None:
        self._deadline = time.monotonic() + seconds
        self._seconds = seconds
        self._max_chars = max_chars
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Make the next `check` raise."""
        self._cancelled.set()

    def check(self, num_chars: int = 0) -> None:
        """Raise `OverBudget` if the time is up, the output is too long, or the rendering was cancelled."""
        if self._cancelled.is_set():
            raise OverBudget("its client has disconnected")
        if num_chars > self._max_chars:
            raise OverBudget(f"it wrote more than {self._max_chars} characters")
        if time.monotonic() > self._deadline:
            raise OverBudget(f"it was still running after {self._seconds:g} s")


_budget: ContextVar[RenderBudget | None] = ContextVar("budget", default=None)
"""Budget of the rendering in this thread."""


class ChatTemplate:
    """The chat templates of one tokenizer, by name. Each is compiled when it is first used.

    `variables`: the named special tokens, which every template may use. `content_format`: see `ContentFormat`.
    """

    def __init__(
        self, sources: Mapping[str, str], variables: Mapping[str, str], content_format: ContentFormat = "auto"
    ) -> None:
        self._sources = sources
        self._variables = variables
        self._content_format = content_format
        self._compiled: dict[str, _CompiledTemplate] = {}
        self._compile_given = functools.lru_cache(MAX_GIVEN_TEMPLATES)(partial(_compile, content_format=content_format))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
        source: str | None = None,
        budget: RenderBudget | None = None,
    ) -> str:
        """Return the prompt. `source`: a template to use in place of the tokenizer's.

        Raises `InvalidRequest` if there is no template or the template raises, and `OverBudget` if the template exceeds
        the `budget`.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "`add_generation_prompt` begins a new message and `continue_final_message` goes on with the last one: "
                "set one of them",
                param="add_generation_prompt",
            )
        check_messages(messages)
        variables: dict[str, Any] = {
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        extra = dict(chat_template_kwargs or {})
        if taken := sorted(variables.keys() & extra.keys()):
            raise InvalidRequest(
                f"`chat_template_kwargs` cannot hold {taken[0]!r}: it is a field of its own",
                param="chat_template_kwargs",
            )
        compiled = self._template("tool_use" if tools and "tool_use" in self._sources else "default", source)
        variables = {**self._variables, **extra, **variables}
        try:
            return compiled.render(messages, variables, budget, continues=continue_final_message)
        except (OverBudget, InvalidRequest):
            raise
        except Exception as error:  # untrusted code may raise anything, which ends this request alone
            raise InvalidRequest(
                f"the chat template refuses these messages: {_explain(error)}", param="messages"
            ) from None

    @property
    def source(self) -> str:
        """Source of the template for tools, which is the usual one if there is no other; empty without a template."""
        return self._sources.get("tool_use") or self._sources.get("default", "")

    def uses(self, name: str) -> bool:
        """Whether the template has this variable."""
        return any(name in source for source in self._sources.values())

    def _template(self, name: str, source: str | None) -> _CompiledTemplate:
        if source is not None:
            return self._compile_given(source)
        if name not in self._sources:
            names = f"; it has {', '.join(map(repr, self._sources))} only" if self._sources else ""
            raise InvalidRequest(
                f"this model has no chat template{names}: give one with the option `chat_template`, or send a prompt "
                "instead of messages",
                param="messages",
            )
        if name not in self._compiled:
            self._compiled[name] = _compile(self._sources[name], self._content_format)
        return self._compiled[name]


def read_template(path: Path) -> str:
    """Return the template in the file of the option `chat_template`. Raises `ConfigError` for a file that cannot be
    read, or is not a Jinja template."""
    name = f"option `chat_template`: {shown(str(path))}"
    if not os.path.isfile(path):  # unlike `Path.is_file`, takes a text of any length
        raise ConfigError(f"{name} is not a file: give the path of a file with a Jinja template")
    try:
        source = read_bounded(path, max_bytes=MAX_TEMPLATE_BYTES).decode()
        _compile(source, "auto")
    except CheckpointError as error:  # names the file
        raise ConfigError(f"option `chat_template`: {error}") from None
    except (UnicodeDecodeError, InvalidRequest) as error:
        raise ConfigError(f"{name}: {error}") from None
    return source


class _CompiledTemplate(NamedTuple):
    template: Template
    form: MessageForm

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        budget: RenderBudget | None,
        *,
        continues: bool,
    ) -> str:
        """Return the prompt, up to the end of the last message if the answer `continues` it.

        A template that fails with messages as transformers passes them gets them in the other forms that templates
        were written for. Raises what the template raises for the first of them.
        """
        try:
            return self._render(messages, self.form, variables, budget, continues=continues)
        except (OverBudget, InvalidRequest):
            raise
        except Exception as error:
            for form in _other_forms(messages, variables["tools"], self.form):
                try:
                    return self._render(messages, form, variables, budget, continues=continues)
                except OverBudget:
                    raise
                except Exception:
                    continue
            raise error

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        form: MessageForm,
        variables: Mapping[str, Any],
        budget: RenderBudget | None,
        *,
        continues: bool,
    ) -> str:
        conversation = arrange_calls([template_message(message, form) for message in messages], form)
        final_text = _open_end(conversation) if continues else ""
        tools = template_tools(variables["tools"], form)
        text = _render(self.template, {**variables, "messages": conversation, "tools": tools}, budget)
        return _cut(text, final_text) if continues else text


def _compile(source: str, content_format: ContentFormat) -> _CompiledTemplate:
    """Compile a template. Raises `InvalidRequest` for an error in it."""
    environment = _environment()
    try:
        form = message_form(environment.parse(source), source, content_format)
        return _CompiledTemplate(environment.from_string(source), form)
    except TemplateSyntaxError as error:
        raise InvalidRequest(
            f"the chat template has an error in line {error.lineno}: {error.message}", param="messages"
        ) from None
    except RecursionError:
        raise InvalidRequest("the chat template is nested too deeply", param="messages") from None


def _other_forms(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, form: MessageForm
) -> Iterator[MessageForm]:
    """Yield the other forms that these messages and tools can have, with the fewest differences to `form` first."""
    differences: list[dict[str, bool]] = []
    if any(message.get("content") is None for message in messages):
        differences.append({"has_empty_content": True})
    if any(message.get("tool_calls") for message in messages) and not form.has_text_arguments:
        differences.append({"has_text_arguments": True})
    if any(has_call_with_reasoning_and_content(message) for message in messages):
        differences.append({"joins_reasoning": True})
    if any(lacks_description(tool) for tool in tools or ()):
        differences.append({"has_descriptions": True})
    for number in range(1, len(differences) + 1):
        for chosen in itertools.combinations(differences, number):
            yield form._replace(**ChainMap(*chosen))


def _open_end(conversation: list[dict[str, Any]]) -> str:
    """Mark the end of the last message's text, and return that text. Raises `InvalidRequest` if it has none."""
    last = conversation[-1]
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + END_OF_TEXT
        return content
    if content:
        text: str = content[-1]["text"]
        content[-1]["text"] = text + END_OF_TEXT
        return text
    raise InvalidRequest("`continue_final_message`: the last message has no content", param="messages")


def _render(template: Template, variables: Mapping[str, Any], budget: RenderBudget | None) -> str:
    token = _budget.set(budget)
    try:
        pieces, num_chars = [], 0
        for piece in template.generate(variables):
            num_chars += len(piece)
            _check_budget(num_chars)
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _budget.reset(token)


def _check_budget(num_chars: int = 0) -> None:
    if (budget := _budget.get()) is not None:
        budget.check(num_chars)


def _cut(text: str, final_text: str) -> str:
    """Return the rendered text up to the end of the last message, whose text is `final_text`."""
    end = text.rfind(END_OF_TEXT.strip())
    if end < 0 or final_text.strip() not in text:
        raise InvalidRequest(
            "`continue_final_message`: the chat template does not show the last message, so it cannot be continued",
            param="messages",
        )
    keeps_space = text.startswith(END_OF_TEXT, end)
    return text[:end] if keeps_space else text[:end].rstrip()


def _explain(error: Exception) -> str:
    if isinstance(error, TemplateError):  # includes the template's own calls of raise_exception
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


class _GenerationBlock(Extension):
    """Parses `{% generation %}` … `{% endgeneration %}`, which marks the model's text for training, as plain text."""

    tags = {"generation"}  # noqa: RUF012 - as declared in the base class

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Sandbox that checks the budget in every iteration of a loop and at every call, and refuses huge products."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, BOUNDED, [], [], None, None, lineno=loop.lineno)
        return template

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _check_budget()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _product_size(operator, left, right) > MAX_PRODUCT:
            raise TemplateError(f"the result of {operator!r} is too large")
        return super().call_binop(context, operator, left, right)


BOUNDED = "_bounded"
"""Name of the filter that is applied to the iterable of every loop."""


def _bounded(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _check_budget()
        yield item


def _product_size(operator: str, left: Any, right: Any) -> int:
    """Return the length of a repeated sequence, or the bits of a number; 0 if it cannot be large."""
    match operator, left, right:
        case "*", (str() | list() | tuple()), int():
            return len(left) * right
        case "*", int(), (str() | list() | tuple()):
            return left * len(right)
        case "*", int(), int():
            return left.bit_length() + right.bit_length()
        case "**", int(), int():
            return left.bit_length() * right
        case _:
            return 0


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.filters[BOUNDED] = _bounded
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON. Jinja's own filter of this name also escapes characters for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
