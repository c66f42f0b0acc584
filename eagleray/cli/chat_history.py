"""The messages of a conversation in the terminal, and the commands that change them. No input or output here."""

from __future__ import annotations

import re

COMMAND_HELP = """\
/clear         forget the conversation
/system TEXT   set the system message of the conversation; without TEXT, remove it
/retry         answer the last message again
/help          show this list
Ctrl-C stops an answer. Ctrl-C again, or Ctrl-D, ends the chat."""

COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A line that is a command, if a command has this name, or the whole line is one word."""


class ChatHistory:
    """Messages of system, user and assistant, in their order."""

    def __init__(self, system: str | None = None) -> None:
        self._system = system
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, as a request has them."""
        first = [{"role": "system", "content": self._system}] if self._system else []
        return first + self._turns

    def read(self, line: str) -> str | None:
        """Read a line that the user typed. Returns a notice to print, or None if the last message is to be answered."""
        match = COMMAND.fullmatch(line.strip())
        if match is None or (match[1] not in COMMANDS and match[2] is not None):
            self.ask(line)
            return None
        if match[1] not in COMMANDS:
            return f"there is no command /{match[1]}; /help lists them"
        return COMMANDS[match[1]](self, match[2] or "")

    def ask(self, text: str) -> None:
        """Add a message of the user."""
        self._turns.append({"role": "user", "content": text})

    def answer(self, text: str) -> None:
        """Add an answer."""
        self._turns.append({"role": "assistant", "content": text})

    def forget_question(self) -> None:
        """Drop the last message, which has no answer."""
        del self._turns[-1:]

    def _clear(self, _: str) -> str:
        self._turns.clear()
        return "the conversation is forgotten"

    def _set_system(self, text: str) -> str:
        self._system = text.strip() or None
        return "the message from the system is set" if self._system else "there is no message from the system now"

    def _retry(self, _: str) -> str | None:
        if self._turns and self._turns[-1]["role"] == "assistant":
            del self._turns[-1]
        return None if self._turns else "there is no message to answer"

    def _help(self, _: str) -> str:
        return COMMAND_HELP


COMMANDS = {
    "clear": ChatHistory._clear,
    "system": ChatHistory._set_system,
    "retry": ChatHistory._retry,
    "help": ChatHistory._help,
}
