"""instructor: answers as objects of classes, by tools, by schemas and in parts."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from checking import MODEL, URL, check, expect, run_checks
from pydantic import BaseModel, Field

QUESTION = [{"role": "user", "content": "Tom is 7 years old. Who is it?"}]


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=150)
    kind: Literal["child", "adult"]


def extract(mode: instructor.Mode, **fields):
    client = instructor.from_openai(openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120), mode=mode)
    return client.create(
        model=MODEL, messages=QUESTION, response_model=Person, max_tokens=300, max_retries=0, temperature=0, **fields
    )


def check_person(person: Person) -> None:
    expect(isinstance(person, Person) and 0 <= person.age <= 150, "not a person", person)


@check("tools")
def tools():
    check_person(extract(instructor.Mode.TOOLS))


@check("strict tools")
def strict_tools():
    check_person(extract(instructor.Mode.TOOLS_STRICT))


@check("JSON schema")
def json_schema():
    check_person(extract(instructor.Mode.JSON_SCHEMA))


@check("Responses with tools")
def responses_tools():
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120), mode=instructor.Mode.RESPONSES_TOOLS
    )
    check_person(
        client.create(
            model=MODEL, messages=QUESTION, response_model=Person, max_tokens=300, max_retries=0, temperature=0
        )
    )


@check("objects in parts")
def partial():
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120), mode=instructor.Mode.TOOLS
    )
    parts = [
        *client.create_partial(
            model=MODEL, messages=QUESTION, response_model=Person, max_tokens=300, max_retries=0, temperature=0
        )
    ]
    expect(len(parts) > 1, "only one part", parts)
    check_person(Person(**parts[-1].model_dump()))


@check("a list of objects")
def iterable():
    client = instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", timeout=120), mode=instructor.Mode.JSON_SCHEMA
    )

    class People(BaseModel):
        people: list[Person] = Field(min_length=1, max_length=2)

    found = client.create(
        model=MODEL, messages=QUESTION, response_model=People, max_tokens=600, max_retries=0, temperature=0
    )
    for person in found.people:
        check_person(person)


if __name__ == "__main__":
    run_checks()
