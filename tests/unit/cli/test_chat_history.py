"""`eagleray chat` and `complete`: conversations in the terminal, and the server that is asked."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest

from eagleray.cli import chat, complete
from eagleray.cli.chat_history import COMMAND_HELP, COMMANDS, ChatHistory
from eagleray.cli.remote import Remote
from eagleray.cli.terminal import TypedLines
from eagleray.errors import EagleRayError, Unavailable, UserError


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


def serve_once(listener: socket.socket, reply: bytes) -> None:
    """Accept one connection, read a request and close after `reply`.

    The whole request is read: closing with bytes unread would reset the connection.
    """
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as request:
        headers = http.client.parse_headers(request) if request.readline() else {}
        request.read(int(headers.get("Content-Length", 0)))
        connection.sendall(reply)


CUT_OFF = b"HTTP/1.1 200 OK\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\nfff\r\ndata: {"


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"SSH-2.0-OpenSSH\r\n", r"no server answers at http://127.0.0.1:\d+/v1 \(SSH-2.0-OpenSSH"),
        (CUT_OFF, r"the answer of http\S+/v1 broke off: its connection was closed"),
    ],
)
def test_remote_stream_of_no_server_or_cut_off_is_unavailable(reply, message):
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(serve_once, listener, reply)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        arguments = argparse.Namespace(url=url, api_key=None, max_tokens=3, temperature=None, model_name="m")
        with pytest.raises(Unavailable, match=message):
            list(Remote(arguments).stream("/completions", {}))
        done.result()


@pytest.mark.parametrize(
    ("body", "model", "message"),
    [
        (b"<h1>hello</h1>", None, "does not answer as OpenAI's API"),
        (b"<h1>hello</h1>", "m", "does not answer as OpenAI's API"),
        (b"[]", None, "lists no model"),
        (b'{"data": []}', None, "lists no model"),
    ],
)
def test_remote_other_server_is_refused(body, model, message):
    reply = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        done = pool.submit(serve_once, listener, reply)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        arguments = argparse.Namespace(url=url, api_key=None, max_tokens=3, temperature=None, model_name=model)
        with pytest.raises(UserError, match=message):
            list(Remote(arguments).stream("/completions", {}))
        done.result()


def typed(monkeypatch, *inputs: str | type[BaseException]) -> TypedLines:
    """Return the lines of a person who types these, or Ctrl-C or Ctrl-D."""
    remaining = iter(inputs)

    def read(prompt: str) -> str:
        one = next(remaining)
        if isinstance(one, str):
            return one
        raise one

    monkeypatch.setattr("builtins.input", read)
    return TypedLines("> ")


def test_typed_lines_end_at_the_second_of_two_interrupts(monkeypatch, capsys):
    lines = iter(typed(monkeypatch, KeyboardInterrupt, "hello", "", KeyboardInterrupt, KeyboardInterrupt))
    assert next(lines) == "hello"
    with pytest.raises(KeyboardInterrupt):
        next(lines)
    assert capsys.readouterr().out.count("Ctrl-C again or Ctrl-D ends") == 2


def test_typed_lines_end_at_an_interrupt_after_a_stopped_answer(monkeypatch):
    lines = typed(monkeypatch, "hello", KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        for _ in lines:
            lines.was_interrupted = True


class FakeResponse:
    """A streamed answer of a few parts, and then an end of some kind."""

    def __init__(self, route: str, *, end: BaseException | None, tail: str = "[DONE]") -> None:
        self._choices = [
            {"delta": {"content": text}} if route == "/chat/completions" else {"text": text} for text in ("one", " two")
        ]
        self._end, self._tail = end, tail
        self.is_closed = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_closed = True

    def __iter__(self):
        for choice in self._choices:
            yield f"data: {json.dumps({'choices': [choice]})}\n".encode()
        if self._end is not None:
            raise self._end
        yield f"data: {self._tail}\n".encode()


class FakeRemote(Remote):
    """A server that gives this kind of answer to everything."""

    def __init__(self, end: BaseException | None = None, **response: str) -> None:
        super().__init__(
            argparse.Namespace(url="http://h", api_key=None, max_tokens=3, temperature=None, model_name="m")
        )
        self._response = {"end": end, **response}

    def _request(self, method, route, body=None):
        self.last_response = FakeResponse(route, **self._response)
        return self.last_response


def test_remote_number_of_tokens_is_that_of_the_server_or_of_parts():
    remote = FakeRemote()
    assert list(remote.stream("/completions", {})) == ["one", " two"]
    assert (remote.answer, remote.num_tokens) == ("one two", 2)
    remote = FakeRemote(tail='{"choices": [], "usage": {"completion_tokens": 7}}')
    assert list(remote.stream("/chat/completions", {})) == ["one", " two"]
    assert (remote.answer, remote.num_tokens) == ("one two", 7)


@pytest.mark.parametrize(
    ("end", "messages", "printed"),
    [
        (None, "u:x a:one two", "one two\n"),
        (KeyboardInterrupt(), "u:x a:one two", "one two"),
        (EagleRayError("the engine is gone"), "", "one two\n"),
    ],
)
def test_chat_answer_that_ends_is_kept_unless_it_failed(end, messages, printed, capsys):
    history, remote = ChatHistory(), FakeRemote(end)
    history.ask("x")
    with pytest.raises(type(end)) if end else contextlib.nullcontext():
        assert chat._answer(remote, history) == 2
    assert (roles(history), remote.last_response.is_closed) == (messages, True)
    assert capsys.readouterr().out == printed


def run_in_terminal(command: ModuleType, remote: Remote, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command whose standard input and output are a terminal."""
    monkeypatch.setattr(command, "Remote", lambda arguments: remote)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    command.run(argparse.Namespace(quick=None, system_prompt=None))


@pytest.mark.parametrize(("command", "line"), [(chat, "/help lists the commands."), (complete, "completes texts.")])
@pytest.mark.parametrize(
    ("end", "out", "err"),
    [
        (None, "one two\n", "[2 tokens, "),
        (KeyboardInterrupt(), "one two [stopped]\n", ""),
        (EagleRayError("the engine is gone"), "one two\n", "eagleray: the engine is gone\n"),
    ],
)
def test_command_in_a_terminal_greets_and_goes_on_after_each_answer(command, line, end, out, err, monkeypatch, capsys):
    typed(monkeypatch, "x", "y", EOFError)
    run_in_terminal(command, FakeRemote(end), monkeypatch)
    shown = capsys.readouterr()
    greeting, _, answers = shown.out.partition("\n")
    assert "m at http://h/v1" in greeting and line in greeting and "Ctrl-D ends" in greeting
    assert answers == 2 * out + "\n"
    assert shown.err.count(err) == 2 if err else shown.err == ""


def test_chat_command_that_is_typed_has_no_speed(monkeypatch, capsys):
    typed(monkeypatch, "/clear", EOFError)
    run_in_terminal(chat, FakeRemote(), monkeypatch)
    shown = capsys.readouterr()
    assert "the conversation is forgotten" in shown.out
    assert shown.err == ""
