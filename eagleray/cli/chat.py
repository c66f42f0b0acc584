"""`eagleray chat`: a conversation with a model of a running server, in the terminal."""

from __future__ import annotations

import argparse
import functools

from eagleray.cli.chat_history import ChatHistory
from eagleray.cli.remote import Remote, add_remote_flags
from eagleray.cli.terminal import answer_lines, print_answer
from eagleray.errors import EagleRayError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_flags(parser)
    parser.add_argument("--system-prompt", help="first message, from the system")


def run(arguments: argparse.Namespace) -> None:
    remote = Remote(arguments)
    history = ChatHistory(arguments.system_prompt)
    if arguments.quick:
        history.ask(arguments.quick)
        _answer(remote, history)
        return
    answer_lines(
        functools.partial(_read, remote, history),
        greeting=f"{remote.model} at {remote.url}. Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands.",
    )


def _read(remote: Remote, history: ChatHistory, line: str) -> int | None:
    """Answer a message, or carry out a command. Returns the number of the answer's tokens; None for a command."""
    notice = history.read(line)
    if notice is None:
        return _answer(remote, history)
    print(notice)
    return None


def _answer(remote: Remote, history: ChatHistory) -> int:
    """Print the answer as it comes and keep it, also if Ctrl-C ends it. Returns the number of its tokens.

    The question is forgotten if the request fails.
    """
    try:
        print_answer(remote.stream("/chat/completions", {"messages": history.messages}))
    except KeyboardInterrupt:
        history.answer(remote.answer)
        raise
    except EagleRayError:
        history.forget_question()
        raise
    history.answer(remote.answer)
    return remote.num_tokens
