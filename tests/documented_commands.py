"""Reader of the code blocks of Markdown files, and of the commands in them.

The first word behind its fence says what a block has: `sh` commands, `console` commands behind `$` and their output,
`text` output or a drawing. The word `run` behind that says that `make docs-commands` executes the block.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK = re.compile(
    r"^(?P<indent> *)(?P<fence>`{3,})(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)(?P=fence) *$", re.M | re.S
)
HERE_DOCUMENT = re.compile(r"<<-?'?(\w+)'?.*?^\1$", re.M | re.S)
OPERATORS = ";&|<>"
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
PROMPT = "$ "
TYPED = re.compile(r"^\$ (?:.*\\\n)*.*\n", re.M)
"""A line behind the prompt, and its continuation lines."""
RUN = "run"


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the words behind that, and its lines without their indentation."""

    document: str
    line: int
    language: str
    marks: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A program with its arguments, without the variables that are set for it."""

    words: tuple[str, ...]

    @property
    def program(self) -> str:
        return self.words[0].rpartition("/")[2]


def blocks(document: str, text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    for found in BLOCK.finditer(text):
        language, *marks = found["info"].split() or [""]
        lines = re.sub(rf"^{found['indent']}", "", found["text"], flags=re.M)
        yield Block(document, text.count("\n", 0, found.start()) + 1, language, tuple(marks), lines)


def shell_text(block: Block) -> str:
    """Return the lines of a block that a shell would read."""
    if block.language == "sh":
        return block.text
    return "".join(typed.removeprefix(PROMPT) for typed in TYPED.findall(block.text))


def commands(text: str) -> Iterator[Command]:
    """Yield the commands of lines of a shell. Raises `ValueError` for a quotation that does not end."""
    text = HERE_DOCUMENT.sub("", text).replace("\\\n", " ")
    line = ""
    for part in text.splitlines():
        line += part
        try:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=OPERATORS)
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:
            line += "\n"  # a quotation goes on in the next line
            continue
        yield from _split(words)
        line = ""
    if line:
        raise ValueError(f"a quotation does not end: {line!r}")


def _split(words: list[str]) -> Iterator[Command]:
    """Divide the words of a line into commands, without the targets of redirections."""
    current: list[str] = []
    is_target = False
    for word in [*words, ";"]:
        if is_target:
            is_target = False
        elif set(word) <= set("<>"):
            is_target = True
            if current and current[-1].isdigit():
                current.pop()
        elif set(word) <= set(OPERATORS):
            if program := tuple(itertools.dropwhile(ASSIGNMENT.match, current)):
                yield Command(program)
            current = []
        else:
            current.append(word)
