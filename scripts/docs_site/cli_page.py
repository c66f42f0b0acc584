"""Reference of the command line, made from the parser of `eagleray`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from docs_site.markdown import code, plain, table
from docs_site.options_page import flags_of, value_of
from eagleray.cli.commands import COMMANDS, make_parser

HEAD = """# Command line

`eagleray COMMAND --help` prints the same.

"""
CONFIG_GROUP = " options"
"""End of the titles of the groups of flags that are options of the configuration."""
WHOLE = "eagleray serve"
"""Command under which the flags of the configuration are listed."""
HIDDEN = (argparse._SubParsersAction, argparse._HelpAction, argparse._VersionAction)
"""Actions without an entry on the page: help, version, and subcommands."""


def page() -> str:
    parser = make_parser(COMMANDS)
    return HEAD + "".join(_command(f"eagleray {name}", command, 2) for name, command in _commands(parser).items())


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands below a command, by name."""
    nested = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return {name: command for action in nested for name, command in action.choices.items()}


def _command(title: str, parser: argparse.ArgumentParser, level: int) -> str:
    text = f"{'#' * level} {title}\n\n{plain(_sentence(parser.description or ''))}\n\n"
    below = _commands(parser)
    if not below:
        places = " ".join(_place(action) for action in parser._actions if _is_in_usage(action))
        text += f"```text\n{title} [OPTIONS] {places}".rstrip() + "\n```\n\n"
    own = [action for group in parser._action_groups[:2] for action in group._group_actions]
    text += _arguments(own)
    shared = []
    for group in parser._action_groups[2:]:
        title_of_group = group.title or ""
        if not title_of_group.endswith(CONFIG_GROUP):
            text += f"**{title_of_group}**\n\n{_arguments(group._group_actions)}"
        elif title == WHOLE:
            text += f"{'#' * (level + 1)} {title_of_group}\n\n{_arguments(group._group_actions)}"
        else:
            shared.append(f"[{title_of_group}](#{title_of_group.replace(' ', '-')})")
    if shared:
        text += f"The flags of these groups are the same as those of `{WHOLE}`: {', '.join(shared)}.\n\n"
    return text + "".join(_command(f"{title} {name}", command, level + 1) for name, command in below.items())


def _arguments(actions: Sequence[argparse.Action]) -> str:
    """Return the table of those arguments that the help shows."""
    shown = (action for action in actions if action.help != argparse.SUPPRESS and not isinstance(action, HIDDEN))
    return table(("argument", "meaning"), [(code(_name(action)), plain(_help(action))) for action in shown])


def _is_in_usage(action: argparse.Action) -> bool:
    return action.required or not action.option_strings


def _place(action: argparse.Action) -> str:
    return f"{action.option_strings[0]} {value_of(action)}" if action.option_strings else value_of(action)


def _name(action: argparse.Action) -> str:
    return flags_of(action) if action.option_strings else value_of(action)


def _help(action: argparse.Action) -> str:
    return (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text.endswith('.') else '.'}" if text else ""
