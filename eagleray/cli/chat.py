"""`eagleray chat`: a conversation with a model of a running server, in the terminal."""

from __future__ import annotations

import argparse

from eagleray.cli.remote import Remote, add_remote_flags
from eagleray.cli.terminal import read_lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_remote_flags(parser)
    parser.add_argument("--system-prompt", help="first message, from the system")


def run(arguments: argparse.Namespace) -> None:
    remote = Remote(arguments)
    messages = [{"role": "system", "content": arguments.system_prompt}] if arguments.system_prompt else []
    for line in [arguments.quick] if arguments.quick else read_lines("> "):
        messages.append({"role": "user", "content": line})
        answer = ""
        for choice in remote.stream("/chat/completions", {"messages": messages}):
            text = choice["delta"].get("content") or ""
            print(text, end="", flush=True)
            answer += text
        print()
        messages.append({"role": "assistant", "content": answer})
