"""Tables of the flags of vLLM that have another name here, no effect, or are refused."""

from __future__ import annotations

from collections import defaultdict

from docs_site.markdown import code, plain, table
from eagleray.config.build import field_owners
from eagleray.config.fates import Expansion, Fate, NoEffect, Refused, Renamed
from eagleray.config.vllm_options import flag
from eagleray.config.vllm_table import TABLE

Flags = defaultdict[str, list[str]]
"""Flags by a sentence about all of them."""


def tables() -> str:
    """Return the tables, each below a heading."""
    own = field_owners()
    fates = {name: TABLE[name] for name in sorted(TABLE.keys() - own.keys())}
    renamed = [(code(flag(name)), options) for name, fate in fates.items() if (options := _options(fate))]
    ignored: Flags = defaultdict(list)
    refused: Flags = defaultdict(list)
    for name, fate in fates.items():
        if isinstance(fate, NoEffect):
            ignored[fate.reason].append(code(flag(name)))
        elif isinstance(fate, Expansion) and not fate.options:
            refused["not supported: the default is the only value"].append(code(flag(name)))
        elif isinstance(fate, Refused):
            refused[fate.reason].append(code(flag(name)))
    return (
        f"### Another name\n\n{table(('flag of vLLM', 'here'), renamed)}"
        f"### No effect\n\n{_by_reason(ignored)}### Refused, unless the value means “off”\n\n{_by_reason(refused)}"
    )


def _options(fate: Fate) -> str:
    if isinstance(fate, Renamed):
        return code(flag(fate.option))
    return ", ".join(code(flag(option)) for option in fate.options) if isinstance(fate, Expansion) else ""


def _by_reason(flags: Flags) -> str:
    rows = ((", ".join(names), plain(reason[:1].upper() + reason[1:]) + ".") for reason, names in flags.items())
    return table(("flags of vLLM", "reason"), rows)
