"""Attacks by constraints and tools: grammars that cost much to compile or to follow, and thousands of them at once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from fuzzing.arena import Arena, attack
from fuzzing.bodies import CHAT, COMPLETIONS, REFUSED, user
from fuzzing.values import Raw, encode, nested
from fuzzing.wire import Address, post, request

ANSWERED = (200, 400)


NUM_LEAVING = 3
"""Number of clients that leave after each hostile constraint."""
NUM_KEPT = 256
"""Number of compiled grammars that a worker keeps."""
LEVEL = '{"type":"object","properties":{"a":', "}}"


def _records(number: int, depth: int = 1) -> dict[str, Any]:
    """Return a schema that no other number has."""
    schema: dict[str, Any] = {"type": "string", "maxLength": 5}
    for level in range(depth):
        name = f"p{number}_{level}"
        schema = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    return schema


def _hostile(number: int) -> dict[str, dict[str, Any]]:
    """Return constraints by name, other ones for each number, so that none has been compiled before."""
    parts = [{"anyOf": [{"properties": {f"p{number}_{i}_{j}": {}}} for j in range(20)]} for i in range(8)]
    patterns = {f"p{number}_{i}": {"pattern": "([a-z]{9}x?){90}"} for i in range(2000)}
    tag: dict[str, Any] = {"type": "const_string", "value": str(number)}
    for _ in range(200):
        tag = {"type": "or", "elements": [tag, {"type": "any_text"}]}
    return {
        "an expression of a million letters": {"regex": f"{number}a{{1000000}}"},
        "nested repetition": {"regex": f"{number}(a{{1000}}){{1000}}"},
        "an ambiguous expression": {"regex": f"{number}" + "(a|aa|aaa)*b" * 50 + "[ab]{500}(c|[a-z]){500}"},
        "an expression of lookarounds": {"regex": f"(?={number})(?<!a)\\1"},
        "300,000 brackets": {"regex": "(" * 300_000},
        "a product of objects": {"json": {"allOf": parts}},
        "2,000 expressions": {"json": {"properties": patterns}},
        "99 levels": {"json": _records(number, 99)},
        "3,000 levels": {"json": nested(3_000, *LEVEL)},
        "50,000 levels": {"json": nested(50_000, '{"items":', "}")},
        "endless references": {"json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
        "bounds of 400 digits": {"json": {"type": "integer", "minimum": Raw("1" + "0" * 400)}},
        "an enum of 100,000 texts": {"json": {"enum": [f"{number}/{i}" for i in range(100_000)]}},
        "100,000 choices": {"choice": [f"{number}/{i}" for i in range(100_000)]},
        "a choice of nothing": {"choice": [""]},
        "a lone surrogate": {"choice": ["\ud800"]},
        "ambiguous rules": {"grammar": f'start: "{number}" a a a\na: a a | a a a | "x" | ""'},
        "recursion to the right": {"grammar": f'start: "{number}" a\na: "x" a | "y" a | ""'},
        "a rule without end": {"grammar": "start: start start"},
        "a tag of 200 levels": {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})},
        "a tag that is no JSON": {"structural_tag": "[" * 2000},
    }


async def warm_up(address: Address) -> None:
    """Fill the cache of grammars, start every process that compiles them, and follow many at once."""

    async def send(constraint: dict[str, Any]) -> None:
        body = {"prompt": "x", "max_tokens": 30, "temperature": 1, "timeout": 60, "structured_outputs": constraint}
        await post(address, COMPLETIONS, encode(body))

    await asyncio.gather(*(send({"json": _records(-number, 5)}) for number in range(1, NUM_KEPT + 1)))
    for number in range(1, NUM_LEAVING + 1):
        for constraint in _hostile(-number).values():
            await send(constraint)


@attack("bodies", "constraints that are huge, ambiguous, recursive or no constraints at all")
async def constraints(arena: Arena) -> None:
    body = {"prompt": "x", "max_tokens": 50, "temperature": 1, "timeout": 60}
    for what, constraint in _hostile(0).items():
        want = (*ANSWERED, 422, 504)  # one that reaches its limits while it runs, or that all time went to
        await arena.post(COMPLETIONS, {**body, "structured_outputs": constraint}, what, want=want, seconds=70)


@attack("bodies", "200 schemas at once that nobody has sent before, and the hostile ones by clients that leave at once")
async def new_constraints(arena: Arena) -> None:
    body = {"prompt": "x", "max_tokens": 30, "temperature": 1, "timeout": 60}
    posts = (
        arena.post(
            COMPLETIONS,
            {**body, "structured_outputs": {"json": _records(number, 5)}},
            f"schema {number}",
            want=(200, 429, 504),
            seconds=70,
        )
        for number in range(200)
    )
    await asyncio.gather(*posts)
    for number in range(1, NUM_LEAVING + 1):
        for constraint in _hostile(number).values():
            payload = encode({**body, "structured_outputs": constraint, "stream": True})
            _, writer = await asyncio.open_connection(*arena.address)
            writer.write(request("POST", COMPLETIONS, payload))
            await writer.drain()
            writer.transport.abort()


@attack("bodies", "thousands of tools, tools with hostile schemas and names, and wrong choices and budgets")
async def tools(arena: Arena) -> None:
    def tool(name: Any, schema: Any = None) -> dict[str, Any]:
        return {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}

    many = [tool(f"f{i}", _records(i)) for i in range(2000)]
    one = [tool("f", _records(0))]
    required = {"tool_choice": "required"}
    cases: dict[str, dict[str, Any]] = {
        "2,000 tools": {"tools": many, **required},
        "2,000 strict tools": {"tools": many},
        "2,000 tools of one name": {"tools": [tool("f")] * 2000},
        "a schema of 3,000 levels": {"tools": [tool("f", nested(3_000, *LEVEL))], **required},
        "a schema of a product": {"tools": [tool("f", _hostile(4)["a product of objects"]["json"])], **required},
        "a name of 20 MB": {"tools": [tool("f" * 20_000_000)]},
        "a name with markers": {"tools": [tool("</tool_call>")]},
        "a name that is a number": {"tools": [tool(5)]},
        "a tool that is a list": {"tools": [[]]},
        "a choice of another": {"tools": one, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "a choice of a number": {"tools": one, "tool_choice": Raw("1e400")},
        "a choice without tools": {**required},
        "a constraint beside a required call": {"tools": one, **required, "structured_outputs": {"regex": "a"}},
        "two constraints": {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        "a format and a constraint": {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "a budget of 2^63": {"thinking_token_budget": 2**63},
        "a budget of -5": {"thinking_token_budget": -5},
        "a budget that is a text": {"thinking_token_budget": "x"},
    }
    for what, fields in cases.items():
        body = {"messages": user("x"), "max_tokens": 30, "timeout": 60, **fields}
        await arena.post(CHAT, body, what, want=(200, *REFUSED, 504), seconds=70)
