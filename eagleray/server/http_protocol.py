"""HTTP/1.1 on one connection: uvicorn's protocol with limits of size and time, and answers to malformed requests.

The parser, llhttp, has no limits and reports trailers as if they were headers, and uvicorn does not time requests that
have begun. A request that breaks a limit gets an answer in the form of every other error, after the answers that are
due on the same connection, and the connection is closed. Owned by the server's event loop.
"""

from __future__ import annotations

import enum
import re
import secrets
from typing import Any

import httptools
import msgspec
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from eagleray.errors import EagleRayError, Overloaded, Unavailable
from eagleray.server.connections import SMALL_REQUEST_BYTES, HttpConnections
from eagleray.server.error_responses import HEADERS_TOO_LARGE, REQUEST_TIMED_OUT, RefusedRequest, error_response
from eagleray.server.paths import route_path
from eagleray.server.request_cycle import RequestCycle, RequestCycleOfHttp10
from eagleray.server.timeouts import BUSY_RETRY_SECONDS, LINGER_SECONDS, RESERVED_SECONDS

MAX_PIPELINED = 64
"""Number of requests that may wait on one connection for the answer to an earlier one."""

LINGER_BYTES = 2**20
"""Number of bytes that a refused client may still send within `LINGER_SECONDS`."""

HOST = re.compile(rb"[A-Za-z0-9._~:\[\]%!$&'()*+,;=-]*")
VERSIONS = ("1.1", "1.0")


class ReadPhase(enum.Enum):
    """The part of a request that arrives next."""

    BETWEEN = enum.auto()
    """Nothing of the next request has arrived."""
    HEADERS = enum.auto()
    BODY = enum.auto()


class HttpProtocol(HttpToolsProtocol):
    """The protocol of one connection.

    `is_reserved`: whether it is beyond the limit of connections, and may only ask for the server's state.
    """

    cycle: RequestCycle

    def __init__(self, config: Config, connections: HttpConnections, *, is_reserved: bool) -> None:
        super().__init__(config, connections.state, app_state={})
        self._shared = connections
        self._options = options = connections.options
        self._is_reserved = is_reserved
        longest = RESERVED_SECONDS if is_reserved else float("inf")
        self._header_timeout = min(options.header_timeout, longest)
        self._idle_timeout = min(options.keep_alive_timeout, longest)
        self._phase = ReadPhase.BETWEEN
        self._since = connections.now
        """Time at which the present phase began, or the last byte of a body arrived."""
        self._num_messages = 0
        self._header_bytes = 0
        """Number of bytes of the present request line and headers that were parsed."""
        self._overhead_bytes = 0
        """Number of bytes of chunk sizes, extensions and trailers since the last byte of a body; -1 just after one."""
        self._unfinished_bytes = 0
        """Number of bytes of the present headers or body, which count in the sum over all connections."""
        self._is_refused = False
        """Whether bytes that arrive from now on are not parsed any longer."""
        self._refusal = b""
        """Answer that is sent when the answers to earlier requests are complete."""
        self._is_lingering = False
        self._ignored_bytes = 0
        """Number of bytes that arrived after their request was answered or refused."""
        self._is_unix = False
        self._unsent_bytes = 0
        self._unsent_since = 0.0
        """Time since which the number of unsent bytes is the same."""

    @property
    def _is_answered(self) -> bool:
        """Whether every request whose headers have arrived has its whole answer."""
        return self.cycle is None or self.cycle.response_complete

    def leave(self) -> None:
        """Close the connection if it is idle, or else after its next answer. One that has had no request yet stays,
        because its first one may be on its way."""
        if not self._is_answered:
            self.cycle.keep_alive = False
        elif self._num_messages and self._phase is ReadPhase.BETWEEN:
            self.transport.close()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._is_unix = self.server is not None and self.server[1] is None
        self._since = self._shared.now
        if self._is_reserved:
            self._shared.reserved[self] = None
        else:
            self._shared.arriving -= 1
        self._wait_for_request()

    def connection_lost(self, exc: Exception | None) -> None:
        self._shared.forget(self)
        self._set_unfinished(0)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Close the connection; the client still gets the rest of its last answer."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # TLS still reads until the client has said that it closes, too
            return
        if self._phase is ReadPhase.BODY and not self.cycle.response_complete:
            self._since = self._shared.now
        while data and not self._is_refused:
            data = self._parse(data)
        if self._is_refused:
            self._ignored_bytes += len(data)
            if self._ignored_bytes > LINGER_BYTES:
                self.flow.pause_reading()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase = ReadPhase.HEADERS
        self._since = self._shared.now
        self._num_messages += 1
        self._header_bytes = self._overhead_bytes = self._ignored_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is ReadPhase.BODY:
            return  # a trailer: a proxy that checks headers has not seen it
        super().on_header(name, value)
        if len(self.headers) > self._options.max_header_count:
            raise RefusedRequest(
                f"the request has more than {self._options.max_header_count} headers, the most that this server "
                "accepts (its option `max_header_count`); send fewer",
                HEADERS_TOO_LARGE,
            )

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            return  # the parser stops here, see `_without_upgrade`
        self._check_headers()
        super().on_headers_complete()
        self._set_unfinished(0)
        is_1_0 = self.parser.get_http_version() == "1.0"
        # uvicorn makes the object itself and takes no class for it
        self.cycle.__class__ = RequestCycleOfHttp10 if is_1_0 else RequestCycle
        self._phase = ReadPhase.BODY
        self._since = self._shared.now
        self._shared.waiting.pop(self, None)
        if self._is_reserved or self._shared.is_leaving:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._overhead_bytes = -1
        if not self.cycle.response_complete:
            self._set_unfinished(self._unfinished_bytes + len(body))
            if self._unfinished_bytes > SMALL_REQUEST_BYTES and not self._shared.has_room_for_large():
                self._set_unfinished(0)
                self._fail_body(_too_many_bytes(self._shared.max_unfinished_bytes))
        else:
            self._ignored_bytes += len(body)
            if self._ignored_bytes > self._shared.max_unfinished_bytes:
                self.transport.close()  # reading on until the next request could take forever
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._phase is not ReadPhase.BODY:
            return  # an upgrade: its body, if it has one, is still to come
        self._phase = ReadPhase.BETWEEN
        self._since = self._shared.now
        self._set_unfinished(0)
        super().on_message_complete()
        if self.cycle.closes_later:
            self.transport.close()
        self._wait_for_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # `check_time` closes what is idle
        if self.transport.is_closing():
            return
        if self._phase is not ReadPhase.HEADERS:
            self._since = self._shared.now
        if self.cycle.closes_later:
            self._end_sending()
            self._is_lingering = self._is_refused
        if self._refusal and self._is_answered:
            self._close_with(self._refusal)
        self._wait_for_request()

    def check_time(self) -> None:
        """Refuse or close the connection if the next part of a request is late."""
        now = self._shared.now
        if self._is_unix:
            self._check_sending(now)
        if self.transport.is_closing():
            return
        passed = now - self._since
        if self._is_lingering:
            if passed > LINGER_SECONDS:
                self.transport.abort()
        elif self.flow.read_paused:  # by this server, so the client cannot continue
            self._since = now
        elif self._is_refused:
            pass  # it waits for the answers to earlier requests
        elif self._phase is ReadPhase.HEADERS:
            if passed > self._header_timeout:
                self._refuse(_late_headers(self._header_timeout))
        elif self._phase is ReadPhase.BODY:
            if passed > self._options.body_timeout:
                self._refuse(_late_body(self._options.body_timeout))
        elif self._is_answered and passed > self._idle_timeout:
            self.transport.close()

    def _check_sending(self, now: float) -> None:
        """Cut a connection whose client reads nothing of its answer. For TCP the kernel does that."""
        unsent = self.transport.get_write_buffer_size()
        if unsent == 0 or unsent != self._unsent_bytes:
            self._unsent_bytes, self._unsent_since = unsent, now
        elif now - self._unsent_since > self._options.send_timeout:
            self.transport.abort()

    def _parse(self, data: bytes) -> bytes:
        """Parse the beginning of `data`. Return the rest."""
        before, num_messages = self._phase, self._num_messages
        # Never more than headers may have, so that the limit is noticed before the memory is taken.
        piece = data if before is ReadPhase.BODY else data[: self._options.max_header_bytes + 1]
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as upgrade:
            return self._without_upgrade() + data[upgrade.args[0] :]
        except httptools.HttpParserError as error:
            self._refuse(_parse_error(error))
            return b""
        if self._num_messages == num_messages + (before is ReadPhase.BETWEEN):
            self._count(len(piece))
        return data[len(piece) :]

    def _count(self, size: int) -> None:
        """Count bytes that all belong to the present request."""
        limit = self._options.max_header_bytes
        if self._phase is ReadPhase.HEADERS:
            self._header_bytes += size
            self._set_unfinished(self._header_bytes)
            if self._header_bytes > limit:
                self._refuse(_large_headers(limit))
            elif self._header_bytes > SMALL_REQUEST_BYTES and not self._shared.has_room_for_large():
                self._refuse(_too_many_bytes(self._shared.max_unfinished_bytes))
        elif self._phase is ReadPhase.BODY:
            # -1: some of them were bytes of the body.
            self._overhead_bytes = 0 if self._overhead_bytes < 0 else self._overhead_bytes + size
            if self._overhead_bytes > limit:
                self._refuse(_large_headers(limit))

    def _check_headers(self) -> None:
        """Raise the error for a request line or headers that are refused."""
        limit = self._options.max_header_bytes
        request_line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        if request_line + sum(len(name) + len(value) + len(": \r\n") for name, value in self.headers) + 2 > limit:
            raise _large_headers(limit)
        version = self.parser.get_http_version()
        if version not in VERSIONS:
            raise RefusedRequest(f"this server speaks HTTP/1.1, not HTTP/{version}")
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise RefusedRequest(f"a request of HTTP/1.1 needs one header `Host`, but {len(hosts) or 'none'} came")
        if hosts and not HOST.fullmatch(hosts[0]):
            raise RefusedRequest("the header `Host` is not the name of a host")
        path = _path_of(self.url)
        if len(self.pipeline) >= MAX_PIPELINED:
            raise Overloaded(
                f"{MAX_PIPELINED} requests wait on this connection for the answer to an earlier one, the most that "
                "this server keeps; open more connections"
            )
        if self._is_reserved and route_path(path, self._options.url_prefix) not in self._shared.open_paths:
            raise self._shared.full_error()

    def _without_upgrade(self) -> bytes:
        """Return the request line and headers again, without the `Upgrade` that this server ignores.

        The parser takes everything after such headers, even a body, for another protocol. A new one replaces it.
        """
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._phase = ReadPhase.BETWEEN
        return b"\r\n".join([*lines, b"", b""])

    def _refuse(self, error: EagleRayError) -> None:
        """Answer with `error` and close the connection, because its next bytes cannot be understood."""
        self._is_refused = True
        self._set_unfinished(0)
        self.parser = None  # type: ignore[assignment]  # frees the part of a header that it keeps
        if self._phase is ReadPhase.BODY:
            self.cycle.keep_alive = False
            if self.cycle.response_complete:  # the application has answered without the body
                self.transport.close()
            else:
                self._fail_body(error)
            return
        self._shared.waiting.pop(self, None)
        self._refusal = self._answer(error)
        if self._is_answered:
            self._close_with(self._refusal)

    def _fail_body(self, error: EagleRayError) -> None:
        """Raise `error` where the application reads the body, so that the application answers."""
        self.cycle.error = error
        self.cycle.message_event.set()

    def _answer(self, error: EagleRayError) -> bytes:
        request_id = secrets.token_hex(16)
        status, headers, reply = error_response(error, request_id)
        self._shared.count_refusal(status)
        body = msgspec.json.encode(reply)
        headers |= {"content-type": "application/json", "content-length": str(len(body))}
        headers |= {"x-request-id": request_id, "connection": "close"}
        pairs = [
            *self.server_state.default_headers,
            *((name.encode(), value.encode()) for name, value in headers.items()),
            *self._shared.cross_origin.answer_headers(self.headers or ()),
        ]
        return b"".join(
            [STATUS_LINE[status], *(name + b": " + value + b"\r\n" for name, value in pairs), b"\r\n", body]
        )

    def _close_with(self, answer: bytes) -> None:
        """Send the last answer of this connection, which is closed when the client has had time to read the answer."""
        self.transport.write(answer)
        self._is_lingering = True
        self._since = self._shared.now
        self.flow.resume_reading()
        self._end_sending()

    def _end_sending(self) -> None:
        if self.transport.can_write_eof():  # TLS cannot: a client knows by its length that the answer is complete
            self.transport.write_eof()

    def _wait_for_request(self) -> None:
        """Enter this connection into `waiting`, from which it may be closed for others, if it has no request."""
        if self._is_answered and self._phase is not ReadPhase.BODY and not (self._is_refused or self._is_reserved):
            self._shared.waiting[self] = self._shared.now

    def _set_unfinished(self, num_bytes: int) -> None:
        """Set the number of bytes of the unfinished request."""
        self._shared.unfinished_bytes += num_bytes - self._unfinished_bytes
        self._unfinished_bytes = num_bytes


def _parse_error(error: httptools.HttpParserError) -> EagleRayError:
    if isinstance(error.__context__, EagleRayError):  # raised by a callback of the parser
        return error.__context__
    return RefusedRequest(f"this is not a request of HTTP/1.1: {error}")


def _path_of(target: bytes) -> str:
    """Return the path of a request target. Raises `MalformedRequest` if there is no path in the target."""
    try:
        path = httptools.parse_url(target).path
    except httptools.HttpParserError:
        path = None
    if path is None:
        raise RefusedRequest("the target of the request is not a path, as in `GET /v1/models HTTP/1.1`")
    return str(path.decode("latin-1"))


def _large_headers(limit: int) -> RefusedRequest:
    return RefusedRequest(
        f"the request line and the headers take more than {limit} bytes, the most that this server accepts (its "
        "option `max_header_bytes`); send less",
        HEADERS_TOO_LARGE,
    )


def _late_headers(seconds: float) -> RefusedRequest:
    return RefusedRequest(
        f"the headers of the request did not arrive within {seconds:g} s (the server's option `header_timeout`)",
        REQUEST_TIMED_OUT,
    )


def _late_body(seconds: float) -> RefusedRequest:
    return RefusedRequest(
        f"nothing more of the request's body arrived for {seconds:g} s (the server's option `body_timeout`)",
        REQUEST_TIMED_OUT,
    )


def _too_many_bytes(most_bytes: int) -> Unavailable:
    return Unavailable(
        f"requests that are still arriving take more than {most_bytes} bytes together, four times the server's option "
        "`max_request_bytes`; try again in a moment",
        retry_after=BUSY_RETRY_SECONDS,
    )
