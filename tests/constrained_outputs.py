"""Answers of the embedded model under random JSON schemas and regular expressions, at temperature 1."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from grammar_walks import demo_walker, schema_errors
from random_schemas import random_regex, random_schema

from eagleray import LLM, SamplingParams
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray.row_errors import RequestError

OPTIONS: dict[str, Any] = {"num_threads": 1, "max_model_len": 400, "structured_outputs_backend": "llguidance"}
MAX_TOKENS = 160
PROMPTS = ("Give me the record as JSON.", "def main():", "The quick brown fox", "What is an engine?")
NUM_SCHEMAS = 1000
NUM_REGEXES = 300


def check_all(llm: LLM, num_seeds: int = 1) -> None:
    """Check the answers for all schemas and regular expressions, each with several seeds."""
    assert check_schemas(llm, range(NUM_SCHEMAS), num_seeds) > NUM_SCHEMAS / 2
    assert check_regexes(llm, range(NUM_REGEXES), num_seeds) > NUM_REGEXES / 2


def check_schemas(llm: LLM, seeds: Sequence[int], num_seeds: int = 1) -> int:
    """Check the answers for these schemas. Returns the number of finished ones."""
    schemas = [random_schema(seed) for seed in seeds]
    constraints = [{"json": json.dumps(schema)} for schema in schemas]
    return _check(llm, constraints, lambda index, text: schema_errors(schemas[index], text) == [], num_seeds)


def check_regexes(llm: LLM, seeds: Sequence[int], num_seeds: int = 1) -> int:
    """Check the answers for these regular expressions. Returns the number of finished ones."""
    patterns = [random_regex(seed) for seed in seeds]
    constraints = [{"regex": pattern} for pattern in patterns]
    return _check(llm, constraints, lambda index, text: bool(re.fullmatch(patterns[index], text)), num_seeds)


def _check(llm: LLM, constraints: list[dict[str, str]], follows: Callable[[int, str], bool], num_seeds: int) -> int:
    """Check that finished answers follow their constraint, and that others begin so. A constraint is refused with a
    sentence, or answered. Returns the number of finished answers."""
    indices = [index for index in range(len(constraints)) for _ in range(num_seeds)]
    params = [
        SamplingParams(
            temperature=1,
            seed=number,
            max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(**constraints[index]),
        )
        for number, index in enumerate(indices)
    ]
    prompts = [PROMPTS[number % len(PROMPTS)] for number in range(len(params))]
    num_finished = 0
    for index, output in zip(indices, llm.generate(prompts, params, use_tqdm=False, errors="return"), strict=True):
        if isinstance(output, RequestError):
            assert re.search(r"`\w+`|no value satisfies the JSON schema", output.message), output.message
            continue
        (answer,) = output.outputs
        if answer.finish_reason == "stop":
            assert follows(index, answer.text), (constraints[index], answer.text)
            num_finished += 1
        else:
            assert answer.finish_reason == "length"
            grammar = demo_walker().compile(**constraints[index])
            assert demo_walker().accepts_beginning(grammar, answer.token_ids), (constraints[index], answer.text)
    return num_finished
