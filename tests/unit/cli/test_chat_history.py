"""Conversations in the terminal: commands, and the server that is asked."""

from __future__ import annotations

import argparse

import pytest

from eagleray.cli import chat
from eagleray.cli.chat_history import COMMAND_HELP, COMMANDS, ChatHistory
from eagleray.cli.remote import Remote
from eagleray.errors import EagleRayError, UserError


def roles(history: ChatHistory) -> str:
    return " ".join(f"{message['role'][0]}:{message['content']}" for message in history.messages)


def test_history_lines_are_messages():
    history = ChatHistory("brief")
    assert history.read("hello") is None
    history.answer("hi")
    assert history.read("/etc/hosts is what?") is None
    assert roles(history) == "s:brief u:hello a:hi u:/etc/hosts is what?"


def test_history_retry_drops_the_last_answer():
    history = ChatHistory()
    assert history.read("/retry") == "there is no message to answer"
    history.read("hello")
    history.answer("hi")
    assert history.read("/retry") is None
    assert roles(history) == "u:hello"


def test_history_clear_keeps_the_system_message():
    history = ChatHistory()
    history.read("hello")
    assert history.read("/system be  brief") == "the message from the system is set"
    assert roles(history) == "s:be  brief u:hello"
    assert history.read("/clear") == "the conversation is forgotten"
    assert roles(history) == "s:be  brief"
    history.read("/system")
    assert history.messages == []


def test_history_refused_question_is_forgotten():
    history = ChatHistory()
    history.read("too long")
    history.forget_question()
    assert history.messages == []


def test_history_help_lists_every_command():
    history = ChatHistory()
    assert history.read("/help") == COMMAND_HELP
    assert all(f"/{name}" in COMMAND_HELP for name in COMMANDS)
    assert history.read("/hlep") == "there is no command /hlep; /help lists them"
    assert history.messages == []


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://host:8000", "http://host:8000/v1"),
        ("http://host:8000/", "http://host:8000/v1"),
        ("https://host/llm/v1", "https://host/llm/v1"),
    ],
)
def test_remote_url_without_a_path_is_that_of_the_api(given, url):
    arguments = argparse.Namespace(url=given, api_key=None, max_tokens=3, temperature=None, model_name="m")
    assert Remote(arguments).url == url


def test_remote_url_that_is_none_is_refused():
    with pytest.raises(UserError, match="expected http://HOST:PORT/v1"):
        Remote(argparse.Namespace(url="host:8000", api_key=None))


class FakeRemote:
    """A server whose answer is a few parts, and then an end of some kind."""

    num_tokens = 0

    def __init__(self, end: BaseException | None) -> None:
        self._end = end
        self.is_closed = False

    def stream(self, route, fields):
        try:
            for text in ("one", " two"):
                yield {"delta": {"content": text}}
            if self._end is not None:
                raise self._end
        finally:
            self.is_closed = True


@pytest.mark.parametrize(
    ("end", "messages", "printed"),
    [
        (None, "u:x a:one two", "one two\n"),
        (KeyboardInterrupt(), "u:x a:one two", "one two [stopped]\n"),
        (EagleRayError("the engine is gone"), "", "one two"),
    ],
)
def test_chat_answer_that_ends_is_kept_unless_it_failed(end, messages, printed, capsys):
    history, remote = ChatHistory(), FakeRemote(end)
    history.ask("x")
    chat._answer_or_explain(remote, history)
    assert (roles(history), remote.is_closed) == (messages, True)
    shown = capsys.readouterr()
    assert shown.out == printed
    assert ("[2 tokens, " in shown.err) == (end is None)
    assert ("eagleray: the engine is gone\n" in shown.err) == isinstance(end, EagleRayError)
