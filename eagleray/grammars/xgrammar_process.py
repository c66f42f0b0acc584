"""The process that compiles grammars with xgrammar, so that a hostile grammar takes no time and memory of the worker.

xgrammar has no limits of its own, and a compilation cannot be stopped from another thread. The process sets both limits
for itself, so that it is gone in time although its parent is killed meanwhile; the next grammar starts another one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import msgspec

from eagleray.errors import EagleRayError, InvalidRequest
from eagleray.grammars.timeouts import LOAD_SECONDS

COMPILE_SECONDS = 1.0
"""Time of the CPU that one grammar may take, so that other work on the host does not have it refused."""
COMPILE_BYTES = 256 * 2**20
"""Memory that one grammar may take, beside what the process has when it is ready."""
MAX_COMPILED_BYTES = 64 * 2**20
"""Largest compiled grammar that is taken over."""
REPLY_MARGIN_SECONDS = 5.0
"""Time beyond `COMPILE_SECONDS` after which the process is taken for hung."""

LENGTH_BYTES = 8


class CompileJob(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar in the form of xgrammar's compiler."""

    method: str
    """Method of `xgrammar.GrammarCompiler`."""
    arguments: list[Any]
    options: dict[str, Any] = {}


class CompileReply(msgspec.Struct, frozen=True, kw_only=True):
    compiled: str = ""
    """The compiled grammar, serialized."""
    error: str | None = None


class TokenVocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """The vocabulary in the form of `xgrammar.TokenizerInfo`."""

    tokens: list[str]
    kind: int
    """Value of `xgrammar.VocabType`."""
    vocab_size: int
    stop_token_ids: list[int]


class CompileProcess:
    """May be used from several threads."""

    def __init__(self, vocabulary: TokenVocabulary) -> None:
        self._vocabulary = msgspec.msgpack.encode(vocabulary)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process unless it runs, and wait until it is ready. Raises `EagleRayError`."""
        with self._lock:
            if self._process is None:
                self._start()

    def _start(self) -> None:
        # `-m` would put the current directory first among the paths.
        program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        if self._ask(self._vocabulary, LOAD_SECONDS) is None:
            raise EagleRayError(
                f"the process that compiles grammars with xgrammar was not ready within {LOAD_SECONDS:.0f} s or has "
                "ended; its output says why"
            )

    def compile(self, job: CompileJob) -> str:
        """Return the compiled grammar, serialized. Raises `InvalidRequest` for one that is wrong or too costly."""
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._kill()  # it has ended between two grammars
            if self._process is None:
                self._start()
            reply = self._ask(msgspec.msgpack.encode(job), COMPILE_SECONDS + REPLY_MARGIN_SECONDS)
        if reply is None:
            raise InvalidRequest(
                f"the grammar takes more than {COMPILE_SECONDS:.0f} s or {COMPILE_BYTES // 2**20} MiB to compile with "
                "xgrammar; make it smaller, or use the backend llguidance",
                param="structured_outputs",
            )
        result = msgspec.msgpack.decode(reply, type=CompileReply)
        if result.error is not None:
            raise InvalidRequest(f"xgrammar refuses the grammar: {result.error}", param="structured_outputs")
        return result.compiled

    def close(self) -> None:
        """Kill the process, if it runs, in the middle of a compilation too."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            self._kill()

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def _ask(self, request: bytes, seconds: float) -> bytes | None:
        """Return the reply, or None if none came in time. Then the process is gone."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        reply = None
        killer = threading.Timer(seconds, self._process.kill)  # which ends writing and reading alike
        killer.start()
        with contextlib.suppress(BrokenPipeError):
            _write(self._process.stdin, request)
            reply = _read(self._process.stdout)
        killer.cancel()
        if reply is None:
            self._kill()
        return reply


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Return the next message, or None at the end, which may come within a message."""
    header = pipe.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    data = pipe.read(size := int.from_bytes(header, "little"))
    return data if len(data) == size else None


def main() -> None:
    """Serve until the parent is gone."""
    with contextlib.suppress(BrokenPipeError):
        _serve()
    os._exit(0)  # the usual exit would write to the broken pipe once more


def _serve() -> None:
    import xgrammar

    vocabulary = _read(sys.stdin.buffer)
    if vocabulary is None:
        return
    info = tokenizer_info(msgspec.msgpack.decode(vocabulary, type=TokenVocabulary))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _write(sys.stdout.buffer, b"")
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + COMPILE_BYTES,) * 2)
    while (message := _read(sys.stdin.buffer)) is not None:
        job = msgspec.msgpack.decode(message, type=CompileJob)
        # The signal ends the process, wherever it computes.
        signal.setitimer(signal.ITIMER_PROF, COMPILE_SECONDS)
        reply = _compile(compiler, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, msgspec.msgpack.encode(reply))


def _compile(compiler: Any, job: CompileJob) -> CompileReply:
    try:
        compiled = getattr(compiler, job.method)(*job.arguments, **job.options).serialize_json()
    except Exception as error:  # of the library, as of many types
        return CompileReply(error=_reason(error))
    if len(compiled) > MAX_COMPILED_BYTES:
        return CompileReply(error=f"it compiles to more than {MAX_COMPILED_BYTES // 2**20} MiB")
    return CompileReply(compiled=compiled)


def tokenizer_info(vocabulary: TokenVocabulary) -> Any:
    """Return the vocabulary as `xgrammar.TokenizerInfo`."""
    import xgrammar

    return xgrammar.TokenizerInfo(
        vocabulary.tokens,
        xgrammar.VocabType(vocabulary.kind),
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=vocabulary.stop_token_ids,
    )


def _reason(error: Exception) -> str:
    """Return the message without the place in the library's source that begins it."""
    text = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
    return text.split(": ", 1)[-1] if text.startswith("[") else text


def _data_bytes() -> int:
    """Return the memory of this process that counts for `RLIMIT_DATA`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmData:")[1].split()[0]) * 1024
