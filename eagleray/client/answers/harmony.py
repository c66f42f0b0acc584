"""Answers of gpt-oss: messages with headers, in the Harmony format, which has reasoning and tool calls in one.

A message is `<|start|>assistant` HEADER `<|message|>` BODY `<|end|>`. Its header names a channel: `analysis` has
reasoning, `commentary` and `final` have content. A message with a recipient, `to=functions.NAME`, is a call; the
recipient stands before the channel or after it. Prompts end with `<|start|>assistant`. The tokens `<|return|>`, behind
the last message, and `<|call|>`, behind a call, end the answer: its text has them only if the generation goes on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from eagleray.client.answers.call_splitter import CallSplitter
from eagleray.client.answers.constraints import (
    arguments_of,
    constant,
    constrained_tools,
    free_text,
    one_of,
    optional,
    repeated,
    sequence,
    tag,
)
from eagleray.client.answers.formats import StructuralFormat, ToolFormat
from eagleray.client.answers.marker_search import MarkerSearch
from eagleray.client.answers.parts import AnswerPart, Content, Splitter
from eagleray.client.answers.text_reader import Emit, Reading, json_ends
from eagleray.client.answers.tools import Tool, ToolChoice

START = "<|start|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
MESSAGE = "<|message|>"
END = "<|end|>"
CALL = "<|call|>"
RETURN = "<|return|>"

ASSISTANT = f"{START}assistant"
FUNCTIONS = "functions."

_CHANNEL = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_BEGINNING = re.compile(
    rf"({re.escape(START)})?\w*({re.escape(CHANNEL)}\w*)?({'|'.join(map(re.escape, (START, END, CALL, RETURN)))})?"
)
"""Headers that are cut off before they have more than a role and a channel. Such a header is no part of the answer."""


class HarmonyFormat(ToolFormat):
    """Calls of gpt-oss. The splitter also splits off the reasoning."""

    name = "openai"
    markers = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

    def fits_template(self, template: str) -> bool:
        return all(marker in template for marker in (START, CHANNEL, MESSAGE, CALL))

    def splitter(self, tools: Sequence[Tool]) -> Splitter:
        return _HarmonySplitter({tool.name for tool in tools})

    def constraint(self, tools: Sequence[Tool], choice: ToolChoice) -> StructuralFormat | None:
        last = [_call(tool) for tool in constrained_tools(tools, choice)]
        if not last:
            return None
        if choice.mode == "auto":
            last.append(_final(free_text()))
        return _answer(*last)  # with one call at most, because the answer ends behind it

    def content_constraint(self, content: StructuralFormat) -> StructuralFormat:
        return _answer(_final(content))


class HarmonyReasoning:
    """A `ReasoningFormat`: the reasoning of gpt-oss."""

    name = "openai_gptoss"
    start = f"{CHANNEL}analysis{MESSAGE}"
    end = END
    end_prefix = ""
    interrupts = (START,)
    answer_header = f"{ASSISTANT}{CHANNEL}final{MESSAGE}"
    markers = HarmonyFormat.markers

    def fits_template(self, template: str) -> bool:
        """See `ReasoningFormat.fits_template`."""
        return HarmonyFormat().fits_template(template)

    def begins_reasoning(self, prompt: str) -> bool:
        """See `ReasoningFormat.begins_reasoning`."""
        return _open_header(prompt).endswith(self.start)

    def may_begin_reasoning(self, prompt: str) -> bool:
        """See `ReasoningFormat.may_begin_reasoning`."""
        return not _open_header(prompt)

    def splitter(self, prompt: str, rest: Splitter) -> Splitter:
        """Return the splitter of the whole answer. It finds calls if `rest` is one of this format, which it replaces;
        otherwise `rest` gets the content."""
        header = _open_header(prompt)
        if isinstance(rest, _HarmonySplitter):
            return _HarmonySplitter(rest.tools, header)
        return _ContentSplitter(_HarmonySplitter(None, header), rest)


class _HarmonySplitter(CallSplitter):
    """`tools`: names of the tools; None if calls are content. `header`: see `_open_header`."""

    _HEADER_BEGINS = (START, CHANNEL, CONSTRAIN, MESSAGE, "to=")
    _HEADER_ENDS = MarkerSearch(MESSAGE, START, END, CALL, RETURN)
    _BODY_ENDS = MarkerSearch(START, END, CALL, RETURN)
    _JSON_ENDS = json_ends(START, END, CALL, RETURN)

    def __init__(self, tools: Collection[str] | None, header: str = "") -> None:
        super().__init__()
        self.tools = tools
        self._header = header
        self._written: set[Emit] = set()
        """Methods of `parts` that have been given text."""

    def read(self) -> Reading[None]:
        self.text.start_record()
        marker = yield from self._read_message(self._header)
        while marker is not None:
            begun = START if marker == START else ""
            self.text.start_record(begun)
            marker = yield from self._read_message(begun)

    def _read_message(self, header: str) -> Reading[str | None]:
        """Read a message of which a part of the header may have been read. Returns the marker behind the message; None
        at the end of the answer."""
        if not header:
            yield from self.text.read_space()
            header = (yield from self.text.take(*self._HEADER_BEGINS)) or ""
        if not header:
            content = self._after_earlier(self.parts.content)
            content(self.text.stop_record())
            return (yield from self.text.read_until(self._BODY_ENDS, content))
        pieces = [header]
        marker: str | None = MESSAGE
        if not header.endswith(MESSAGE):
            marker = yield from self.text.read_until(self._HEADER_ENDS, pieces.append)
        header, written = "".join(pieces), self.text.stop_record()
        if marker == MESSAGE:
            return (yield from self._read_body(header))
        if not _BEGINNING.fullmatch(written):
            self._after_earlier(self.parts.content)(written.removesuffix(START))
        return marker

    def _read_body(self, header: str) -> Reading[str | None]:
        """Read the text of a message and return the marker behind it."""
        found = _CHANNEL.search(header)
        channel = found[1] if found else ""
        function = self._function(header, channel)
        if function is not None:
            self.begin_call(function)
            yield from self.read_written_arguments(self._BODY_ENDS, self._JSON_ENDS)
            return (yield from self.text.take(START, END, CALL, RETURN))
        emit = self.parts.reasoning if channel == "analysis" else self.parts.content
        return (yield from self.text.read_until(self._BODY_ENDS, self._after_earlier(emit)))

    def _function(self, header: str, channel: str) -> str | None:
        """Return the name of the function that a message calls; None if the message is no call."""
        found = _RECIPIENT.search(header)
        if found is None or self.tools is None or found[1] == "assistant":
            return None
        name = found[1].removeprefix(FUNCTIONS)
        # The tools that OpenAI's models have built in are called in the reasoning, without a prefix.
        is_function = name != found[1] or name in self.tools or channel != "analysis"
        return name if name and is_function else None

    def _after_earlier(self, emit: Emit) -> Emit:
        """Return a function that emits the text of a message, on a new line if there was text of its kind before."""
        separator = "\n" if emit in self._written else ""

        def emit_text(text: str) -> None:
            nonlocal separator
            if text:
                emit(separator + text)
                separator = ""
                self._written.add(emit)

        return emit_text


class _ContentSplitter(Splitter):
    """Gives the content of one splitter to another."""

    def __init__(self, first: Splitter, second: Splitter) -> None:
        self._first = first
        self._second = second

    def push(self, text: str) -> list[AnswerPart]:
        return self._pass_on(self._first.push(text))

    def finish(self) -> list[AnswerPart]:
        return self._pass_on(self._first.finish()) + self._second.finish()

    def _pass_on(self, parts: Sequence[AnswerPart]) -> list[AnswerPart]:
        return [
            last for part in parts for last in (self._second.push(part.text) if isinstance(part, Content) else [part])
        ]


def _open_header(prompt: str) -> str:
    """Return the header of the message that the answer to a prompt continues, as far as the prompt has it; "" if it has
    none but the role."""
    _, start, message = prompt.rpartition(START)
    if not start or any(end in message for end in (END, CALL, RETURN)):
        return ""
    header, marker, _ = message.partition(MESSAGE)
    return header + marker if marker or CHANNEL in header or _RECIPIENT.search(header) else ""


def _answer(*last: StructuralFormat) -> StructuralFormat:
    """Return the format of an answer whose last message has one of the formats."""
    before = [tag(f"{CHANNEL}{channel}{MESSAGE}", free_text(), END) for channel in ("analysis", "commentary")]
    return sequence(
        optional(constant(ASSISTANT)),  # stands in the prompt, or else behind the reasoning
        repeated(sequence(one_of(*before), constant(ASSISTANT))),
        one_of(*last),
    )


def _final(content: StructuralFormat) -> StructuralFormat:
    return sequence(constant(f"{CHANNEL}final{MESSAGE}"), content)


def _call(tool: Tool) -> StructuralFormat:
    """Return the format of a call: with the recipient before the channel, as templates write it, or after it."""
    recipient, channel = f" to={FUNCTIONS}{tool.name}", f"{CHANNEL}commentary"
    return sequence(
        one_of(constant(recipient + channel), constant(channel + recipient)),
        one_of(*(constant(f"{constrain}json{MESSAGE}") for constrain in (" ", f" {CONSTRAIN}", CONSTRAIN))),
        arguments_of(tool),
    )
