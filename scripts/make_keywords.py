"""Write `eagleray/config/keywords.py`: the keyword arguments of `LLM` as a type, which editors complete.

    python scripts/make_keywords.py            write the file
    python scripts/make_keywords.py --check    fail if it is not up to date

Made from the sections of the configuration and from the table of vLLM's options.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec

from eagleray.config.build import option_types
from eagleray.config.sections import Config
from eagleray.config.vllm_table import SWITCHES, TABLE

PATH = Path(__file__).parents[1] / "eagleray/config/keywords.py"

HEAD = '''"""Keyword arguments of `LLM`, for type checkers and editors. Made by `make keywords`, never edited."""

from __future__ import annotations

from typing import Any, Literal, TypedDict


class EngineKeywords(TypedDict, total=False):
    """Options of eagleray by name, without those of the HTTP server."""

{own}

class LLMKeywords(EngineKeywords, total=False):
    """Options of eagleray, and those of vLLM that are known, see "Options" in docs/compatibility.md."""

{theirs}'''

TYPES = {"kv_cache_memory": "str | int | None", "placement_group": "Any"}
"""Annotations of options that take further types: numbers of bytes, and objects of Ray."""


def source() -> str:
    """Return the text of the module, formatted."""
    text = HEAD.format(own="".join(_own()), theirs="".join(_theirs()))
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(PATH), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def _own() -> Iterator[str]:
    for section in msgspec.structs.fields(Config):
        for field in msgspec.structs.fields(section.type) if section.name != "serving" else ():
            if field.name != "model":  # the position
                yield f"    {field.name}: {TYPES.get(field.name) or _type(option_types()[field.name])}\n"


def _theirs() -> Iterator[str]:
    own = {
        f.name for s in msgspec.structs.fields(Config) if s.name != "serving" for f in msgspec.structs.fields(s.type)
    }
    for name in sorted(TABLE.keys() - own):
        yield f"    {name}: {'bool | None' if name in SWITCHES else 'Any'}\n"


def _type(kind: Any) -> str:
    """Return the annotation of an option; texts are accepted in place of numbers, lists and objects."""
    if get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(repr, get_args(kind)))}] | str | None"
    if get_origin(kind) is list:
        return f"list[{get_args(kind)[0].__name__}] | str | None"
    if get_origin(kind) is dict:
        return "dict[str, Any] | str | None"
    return f"{kind.__name__} | None" if kind in (bool, str) else f"{kind.__name__} | str | None"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the file is not up to date")
    if not parser.parse_args().check:
        PATH.write_text(source())
        return 0
    if PATH.read_text() == source():
        return 0
    print(f"{PATH.name} is not up to date: run `make keywords`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
