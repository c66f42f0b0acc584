"""Regular expressions of JSON schemas (ECMA-262) in the syntax of Rust, which llguidance takes."""

from __future__ import annotations

import re

TOKENS = re.compile(r"\\(?:x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|u\{[0-9A-Fa-f]+\}|c[A-Za-z]|.)|\[\^?|.", re.DOTALL)
CODE = re.compile(r"\\(?:x|u\{?)([0-9A-Fa-f]+)\}?")

SPACE = r"\t\n\x0B\x0C\r \x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000}\x{FEFF}"
"""Characters of ECMA's `\\s`, for a class. Rust's has U+0085 in place of U+FEFF."""
REPLACED = {"\\s": f"[{SPACE}]", "\\S": f"[^{SPACE}]", "\\0": "\\x00"}
DOT = r"[^\n\r\x{2028}\x{2029}]"

CONTROLS = {*map(chr, range(32)), "\x7f"} - set("\b\t\n\f\r")
"""Characters that JSON writes as `\\u00…` only. llguidance takes such a character alone for an empty text."""


def to_rust(pattern: str) -> str:
    """Return the expression with the same meaning in Rust. Syntax that is wrong in both is left as it is. Raises
    ValueError for an expression that llguidance does not follow."""
    parts: list[str] = []
    in_class: list[str] | None = None  # its tokens, after "[" or "[^"
    for token in TOKENS.findall(pattern):
        if token == "\\":
            raise ValueError("it ends with a lone backslash")
        if in_class is None:
            if token in ("[", "[^"):
                in_class = []
            elif token == ".":
                token = DOT
            else:
                _check_text([token])
        elif token == "]":
            if not in_class:
                raise ValueError("it has a class of characters that is empty")
            if parts[-len(in_class) - 1] == "[":
                _check_text(in_class)
            in_class = None
        else:
            in_class.append(token)
            # Rust has nested classes and operators (&&, --, ~~) in classes.
            if token in ("[", "[^", "&", "~") or (token == "-" and in_class[-2:-1] == ["-"]):
                token = "\\" + token
        parts.append(f"\\x{ord(token[2]) % 32:02X}" if token.startswith("\\c") else REPLACED.get(token, token))
    return "".join(parts)


def _check_text(tokens: list[str]) -> None:
    """Raise ValueError if the tokens are a single control character."""
    if len(tokens) == 1 and _character(tokens[0]) in CONTROLS:
        raise ValueError("it has a single control character")


def _character(token: str) -> str:
    """Return the character that a token stands for, or "" if it stands for several."""
    if found := CODE.fullmatch(token):
        return chr(min(int(found[1], 16), 0x10FFFF))
    if token.startswith("\\c"):
        return chr(ord(token[2]) % 32)
    return {"\\v": "\v", "\\0": "\0"}.get(token, token if len(token) == 1 else "")
