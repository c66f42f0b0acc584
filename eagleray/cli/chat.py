"""`eagleray chat`: a conversation with a model of a running server, in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

from eagleray.cli.chat_history import ChatHistory
from eagleray.cli.remote import Remote, add_remote_flags
from eagleray.cli.terminal import TypedLines
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
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        print(f"{remote.model} at {remote.url}. Ctrl-C stops an answer, Ctrl-D ends, /help lists the commands.")
    lines = TypedLines("> ")
    for line in lines:
        notice = history.read(line)
        if notice is not None:
            print(notice)
        elif is_terminal:
            lines.was_interrupted = _answer_or_explain(remote, history)
        else:
            _answer(remote, history)


def _answer_or_explain(remote: Remote, history: ChatHistory) -> bool:
    """Print an answer and its speed, or the error of a request that fails. Ctrl-C stops the answer, not the chat.

    Returns whether the answer was stopped."""
    start = time.monotonic()
    try:
        num_tokens = _answer(remote, history)
        speed = num_tokens / (time.monotonic() - start)
        print(f"[{num_tokens} tokens, {speed:.1f} tokens/s]", file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]")
        return True
    except EagleRayError as error:
        history.forget_question()
        print(f"eagleray: {error}", file=sys.stderr)
    return False


def _answer(remote: Remote, history: ChatHistory) -> int:
    """Print the answer as it comes and keep it, also if Ctrl-C ends it. Returns the number of its tokens."""
    answer = ""
    num_parts = 0
    fields = {"messages": history.messages, "stream_options": {"include_usage": True}}
    try:
        with contextlib.closing(remote.stream("/chat/completions", fields)) as choices:
            for choice in choices:
                text = choice["delta"].get("content") or ""
                print(text, end="", flush=True)
                answer += text
                num_parts += 1
    except KeyboardInterrupt:
        history.answer(answer)
        raise
    except EagleRayError:
        print()  # the error begins a line
        raise
    print()
    history.answer(answer)
    return remote.num_tokens or num_parts
