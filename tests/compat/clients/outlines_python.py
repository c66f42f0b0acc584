"""outlines: types, choices, patterns and grammars, through its interfaces for OpenAI's API and for vLLM's."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import outlines
from checking import MODEL, URL, check, expect, run_checks
from outlines.types import CFG, Regex
from pydantic import BaseModel, Field

QUESTION = "What is a list?"
SETTINGS = {"max_tokens": 300, "temperature": 0}
GRAMMAR = 'start: "(" item ("," item)* ")"\nitem: /[0-9]{1,2}/\n'


class Item(BaseModel):
    """A thing with a price."""

    name: str = Field(max_length=20)
    price: int = Field(ge=0, le=1000)


def client() -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120)


def vllm(output_type, **fields):
    return outlines.from_vllm(client(), MODEL)(QUESTION, output_type, **(SETTINGS | fields))


@check("OpenAI: class")
def openai_class():
    Item.model_validate_json(outlines.from_openai(client(), MODEL)(QUESTION, Item, **SETTINGS))


@check("vLLM: class")
def vllm_class():
    Item.model_validate_json(vllm(Item))


@check("vLLM: choice")
def vllm_choice():
    expect(vllm(Literal["yes", "no"]) in ("yes", "no"), "neither choice")


@check("vLLM: pattern")
def vllm_pattern():
    text = vllm(Regex(r"[A-Z]{3}-\d{2}"))
    expect(re.fullmatch(r"[A-Z]{3}-\d{2}", text), "no match", text)


@check("vLLM: grammar")
def vllm_grammar():
    text = vllm(CFG(GRAMMAR))
    expect(re.fullmatch(r"\(\d{1,2}(,\d{1,2})*(,|\))?", text), "not of the grammar", text)


@check("vLLM: stream")
def vllm_stream():
    parts = [*outlines.from_vllm(client(), MODEL).stream(QUESTION, Item, **SETTINGS)]
    expect(len(parts) > 1, "one part", parts)
    expect(set(json.loads("".join(parts))) == {"name", "price"}, "not an item", parts)


if __name__ == "__main__":
    run_checks()
