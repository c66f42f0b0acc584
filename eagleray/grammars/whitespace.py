"""The check of the option for white space in JSON. Imports llguidance only where it is needed, and no torch."""

from __future__ import annotations

from eagleray.errors import ConfigError
from eagleray.grammars.llguidance_schemas import prepare_schema
from eagleray.messages.structured_outputs import DEFAULT_WHITESPACE

MAX_SHOWN_CHARS = 100
MAX_REASON_CHARS = 300


def check_whitespace(whitespace: str, backend: str) -> None:
    """Raise `ConfigError` if the library of the option `structured_outputs_backend` cannot follow the option
    `structured_outputs_whitespace`."""
    if whitespace in ("", DEFAULT_WHITESPACE):
        return
    if backend == "xgrammar":
        raise ConfigError(
            "option `structured_outputs_whitespace`: xgrammar follows the default and an empty value alone: leave the "
            "option out, or use the `structured_outputs_backend` llguidance"
        )
    from llguidance import LLMatcher

    if reason := LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(prepare_schema("{}", whitespace))):
        raise ConfigError(
            f"option `structured_outputs_whitespace`: expected a regular expression without lookaround, but got "
            f"{whitespace[:MAX_SHOWN_CHARS]!r}: {' '.join(reason.split())[:MAX_REASON_CHARS]}"
        )
