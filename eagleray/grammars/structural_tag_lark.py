"""Structural tags as grammars of llguidance."""

from __future__ import annotations

from collections.abc import Sequence

from eagleray.errors import InvalidRequest
from eagleray.grammars.free_text import FreeText, Opening
from eagleray.grammars.lark_rules import EMPTY, Definition, LarkRules, SpecialTokens, literal, one_of, sequence
from eagleray.grammars.llguidance_errors import GrammarTooLarge
from eagleray.grammars.structural_tags import (
    AnyTextFormat,
    ConstStringFormat,
    Format,
    GrammarFormat,
    OptionalFormat,
    OrFormat,
    PlusFormat,
    RegexFormat,
    RepeatFormat,
    SchemaFormat,
    SequenceFormat,
    StarFormat,
    TagFormat,
    TagsWithSeparatorFormat,
    TokenFormat,
    TriggeredTagsFormat,
    name_field,
)
from eagleray.grammars.xml_parameters import XML_STYLES, XmlParameters

End = Sequence[Opening]
"""Openings of the formats that may follow a format; empty at the end of the text."""


def to_lark(form: Format, tokens: SpecialTokens, whitespace: str, param: str) -> Definition:
    """Return a grammar of llguidance. `whitespace`: see `Grammar`. Raises `InvalidRequest` about the field `param`."""
    rules = LarkRules()
    try:
        return rules.to_grammar(_Writer(rules, tokens, whitespace).write(form, ()))
    except RecursionError:
        raise GrammarTooLarge("the structural tag is nested too deeply", param=param) from None
    except InvalidRequest:
        raise
    except ValueError as error:
        raise InvalidRequest(f"the structural tag is wrong: {error}", param=param) from None


class _Writer:
    """Writes formats into rules. Methods raise ValueError."""

    def __init__(self, rules: LarkRules, tokens: SpecialTokens, whitespace: str) -> None:
        self._rules = rules
        self._tokens = tokens
        self._whitespace = whitespace
        self._free = FreeText(rules, tokens)

    def write(self, form: Format, end: End) -> str:
        """Return the expression for a format and what comes after it."""
        match form:
            case AnyTextFormat(excludes):
                return self._free.until(end, excludes) if end else self._free.to_end(excludes)
            case TriggeredTagsFormat():
                return self._triggered(form, end)
            case SequenceFormat(elements):
                return self._sequence(elements, end)
            case OrFormat(elements):
                return one_of(self.write(element, end) for element in elements)
            case OptionalFormat(content):
                return one_of([self.write(content, end), self._any_of(end)])
            case TagFormat() if _is_free(form):
                return sequence([self._literal(self._text(form.begin)), self.write(form.content, end)])
            case _:
                return sequence([self._bounded(form), self._any_of(end)])

    def _bounded(self, form: Format) -> str:
        """Return the expression for a format that ends by itself."""
        match form:
            case ConstStringFormat(value):
                return self._literal(value)
            case TokenFormat():
                return self._literal(self._text(form))
            case RegexFormat(pattern):
                return self._rules.regex(pattern)
            case GrammarFormat(grammar):
                return self._rules.grammar(grammar)
            case SchemaFormat():
                return self._schema(form)
            case TagFormat():
                return self._tag(form)
            case TagsWithSeparatorFormat():
                return self._separated(form)
            case PlusFormat(content):
                return f"{self._repeated(content)}+"
            case StarFormat(content):
                return f"{self._repeated(content)}*"
            case RepeatFormat(least, most, content):
                if not 0 <= least <= (most if most >= 0 else least):
                    raise ValueError(f"`repeat` needs 0 <= min <= max, but they are {least} and {most}")
                return f"{self._repeated(content)}{{{least},{most if most >= 0 else ''}}}" if most else EMPTY
            case _:
                return self._rules.rule(self.write(form, ()))

    def _repeated(self, content: Format) -> str:
        if _is_free(content):
            raise ValueError("free text cannot be repeated: put it into a tag that has an end")
        return self._rules.rule(self._bounded(content))

    def _sequence(self, elements: Sequence[Format], end: End) -> str:
        expressions = [self._any_of(end)]  # from the last one on
        for element, following in zip(reversed(elements), [None, *reversed(elements)], strict=False):
            if not _is_free(element):
                expressions.append(self._bounded(element))
                continue
            openings: End | None = end
            if following is not None:
                del expressions[-1]
                openings = self._openings(following, self._rules.rule(sequence(reversed(expressions))))
            if openings is None:
                raise ValueError("what follows free text in a sequence has to be a const_string, a token, or a tag")
            expressions = [self.write(element, openings)]
        return sequence(reversed(expressions))

    def _openings(self, form: Format, rest: str) -> End | None:
        """Return the ways in which a format and the `rest` begin. None if they are not known."""
        match form:
            case ConstStringFormat(value) if value:
                return [self._free.opening(value, rest)]
            case TokenFormat():
                return [self._free.opening(self._text(form), rest)]
            case TagFormat() if form.begin:
                return [self._free.opening(self._text(form.begin), sequence([self._inside(form), rest]))]
            case OrFormat(elements):
                found = [self._openings(element, rest) for element in elements]
                known = [openings for openings in found if openings is not None]
                return [opening for openings in known for opening in openings] if len(known) == len(found) else None
            case _:
                return None

    def _tag(self, tag: TagFormat) -> str:
        return sequence([self._literal(self._text(tag.begin)), self._inside(tag)])

    def _inside(self, tag: TagFormat) -> str:
        """Return the expression for the content of a tag, and its end."""
        ends = [self._text(end) for end in _ends(tag)]
        openings = [self._free.opening(end) for end in ends if end]
        if not _is_free(tag.content) and len(openings) < len(ends):
            return self._rules.rule(sequence([self._bounded(tag.content), one_of([EMPTY, *self._full(openings)])]))
        if len(openings) < len(ends):
            raise ValueError(f"the tag {tag.begin!r} has free text, so each of its ends has to be a text")
        return self._rules.rule(self.write(tag.content, openings))

    def _triggered(self, form: TriggeredTagsFormat, end: End) -> str:
        openings = [
            self._free.opening(
                self._text(tag.begin), self._inside(tag), trigger=_trigger_of(self._text(tag.begin), form.triggers)
            )
            for tag in form.tags
        ]
        first = one_of(self._full(openings))
        triggered = self._rules.rule(self._free.until(openings, form.excludes, end))
        rest = self._rules.rule(
            self._free.until(end, form.excludes, openings) if end else self._free.to_end(form.excludes, openings)
        )
        if form.stop_after_first:
            after = self._any_of(end)
            return sequence([first, after]) if form.at_least_one else one_of([sequence([triggered, after]), rest])
        return sequence([first if form.at_least_one else EMPTY, f"{triggered}*", rest])

    def _separated(self, form: TagsWithSeparatorFormat) -> str:
        tag = self._rules.rule(one_of(map(self._tag, form.tags)))
        tags = tag if form.stop_after_first else sequence([tag, f"({sequence([self._literal(form.separator), tag])})*"])
        return tags if form.at_least_one else f"({tags})?"

    def _schema(self, form: SchemaFormat) -> str:
        if form.json_schema is False:
            raise ValueError("the JSON schema `false` matches nothing")
        schema = {} if form.json_schema is True else form.json_schema
        whitespace = self._whitespace
        if form.max_whitespace_cnt is not None and whitespace:
            whitespace = f"[ \\n\\t]{{0,{form.max_whitespace_cnt}}}" if form.max_whitespace_cnt else ""
        try:
            if form.style != "json":
                return XmlParameters(self._rules, self._free, XML_STYLES[form.style], whitespace).write(schema)
            return self._rules.json_schema(schema, whitespace)
        except InvalidRequest as error:
            raise name_field(error, form.param) from None

    def _any_of(self, end: End) -> str:
        return self._rules.rule(one_of(self._full(end))) if end else EMPTY

    def _full(self, openings: End) -> list[str]:
        return [opening.full for opening in openings]

    def _literal(self, text: str) -> str:
        return literal(self._tokens.split(text))

    def _text(self, marker: str | TokenFormat) -> str:
        """Return the text of a marker, which for a token is its content."""
        if isinstance(marker, str):
            return marker
        for content, token_id in self._tokens.ids.items():
            if marker.token in (content, token_id):
                return content
        raise ValueError(f"the token {marker.token!r} is none of the special tokens of this model")


def _is_free(form: Format) -> bool:
    """Whether a format has no end of its own."""
    match form:
        case AnyTextFormat() | TriggeredTagsFormat():
            return True
        case SequenceFormat(elements):
            return bool(elements) and _is_free(elements[-1])
        case OrFormat(elements):
            return any(map(_is_free, elements))
        case OptionalFormat(content):
            return _is_free(content)
        case TagFormat():
            return not any(_ends(form)) and _is_free(form.content)
        case _:
            return False


def _ends(tag: TagFormat) -> Sequence[str | TokenFormat]:
    return tag.end if isinstance(tag.end, list) else [tag.end]


def _trigger_of(begin: str, triggers: Sequence[str]) -> str:
    found = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
    if len(found) != 1:
        raise ValueError(f"the tag {begin!r} has to begin with exactly one of the triggers {list(triggers)}")
    return found[0]
