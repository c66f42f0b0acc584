"""API keys of the commands: the key of a client, and the hiding of keys on a command line.

All users of a host can read the command line of every process (`ps`, /proc/PID/cmdline). Linux shows a part of the
process's own memory there, so the process can overwrite it. Driven by `cli.commands`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from eagleray.config.api_keys import divided_keys
from eagleray.config.environment import API_KEY_VARIABLE

FLAGS = ("--api-key", "--admin-api-key", "--hf-token")
ENVIRONMENT_HELP = f"API key to send (default: the variable {API_KEY_VARIABLE}, or else OPENAI_API_KEY)"

ARG_START, ARG_END = 48, 49
"""Fields of /proc/self/stat, counted from 1: begin and end of the arguments in memory."""


def client_key(given: str | None) -> str | None:
    """Return the key that a client sends: the given one, or else the environment's."""
    ours = divided_keys(os.environ.get(API_KEY_VARIABLE, ""))
    return given or (ours[0] if ours else os.environ.get("OPENAI_API_KEY"))


def hide_api_keys(arguments: Sequence[str]) -> bool:
    """Overwrite the API keys in the command line of this process that other users see.

    Python's own copies stay. Returns whether no key can be seen any longer: some systems have no way to hide them.
    """
    keys = _keys_in(arguments)
    return not keys or _overwrite(keys)


def _keys_in(arguments: Sequence[str]) -> set[bytes]:
    """Return the arguments that have keys, whole, as the system shows them."""
    found = set()
    is_key = False
    for argument in arguments:
        if argument.startswith("-"):
            flag, equals, _ = argument.partition("=")
            is_key = _is_key_flag(flag) and not equals
            if _is_key_flag(flag) and equals:
                found.add(os.fsencode(argument))
        elif is_key and argument:
            found.add(os.fsencode(argument))
    return found


def _overwrite(keys: set[bytes]) -> bool:
    try:
        line = Path("/proc/self/cmdline").read_bytes()
        stat = Path("/proc/self/stat").read_text()
    except OSError:  # not Linux
        return False
    fields = stat[stat.rindex(")") + 1 :].split()  # from the third on: the second, a name, may contain blanks
    start, end = (int(fields[number - 3]) for number in (ARG_START, ARG_END))
    if not start or end - start != len(line):
        return False
    memory = (ctypes.c_char * len(line)).from_address(start)
    if memory.raw != line:  # not what the system shows
        return False
    memory.raw = b"\0".join(_hidden(part) if part in keys else part for part in line.split(b"\0"))
    return not keys & set(Path("/proc/self/cmdline").read_bytes().split(b"\0"))


def _hidden(argument: bytes) -> bytes:
    """Return a replacement of the same length, because the next argument begins behind it."""
    flag, equals, _ = argument.partition(b"=")
    kept = flag + equals if equals and _is_key_flag(os.fsdecode(flag)) else b""
    return kept + b"*" * (len(argument) - len(kept))


def _is_key_flag(flag: str) -> bool:
    return flag.replace("_", "-") in FLAGS
