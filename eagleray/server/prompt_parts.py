"""The prompts in a field that takes one prompt or several, as texts or as token ids."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from eagleray.errors import InvalidRequest

Prompts = str | list[str | int | list[int]]
PromptField = Annotated[
    Prompts,
    Meta(description="A text, a list of texts, the token ids of one prompt, or a list of those."),
]


def split_prompts(given: Prompts, name: str) -> list[str | list[int]]:
    """Return the prompts of the field `name`, each a text or token ids. Raises `InvalidRequest`."""
    parts = [given] if isinstance(given, str) else given
    if not parts:
        raise InvalidRequest(f"`{name}` is empty; give a text, or token ids", param=name)
    kinds = set(map(type, parts))  # quick even for a million of them
    if int not in kinds:
        return parts  # type: ignore[return-value]
    if kinds == {int}:
        return [parts]  # type: ignore[list-item]
    raise InvalidRequest(
        f"`{name}` mixes token ids with whole prompts; put the ids of each prompt into a list of their own", param=name
    )
