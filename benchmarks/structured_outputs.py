"""Cost of constrained texts: masks, compilation, time per token, hostile grammars.

python benchmarks/structured_outputs.py masks [--backend llguidance xgrammar] [--tokenizer FILE] [--repeat 5]
python benchmarks/structured_outputs.py tokens [--model demo dense-0.6b] [--tokens 64] [--repeat 5] [--threads N]
python benchmarks/structured_outputs.py hostile [--seconds 20]

`masks` computes the mask before every token of usual texts, with a vocabulary of 151,936 tokens, which is trained on
Python's sources for a minute and kept, or that of a tokenizer.json. `tokens` runs 16 requests with and without a
grammar in turn on one engine. `hostile` sends hostile grammars, and reads a stream while others send them and new
schemas. `--trial` runs everything once, on small models.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import numpy as np
from process_memory import PeakMemory
from shapes import SHAPES, make
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from eagleray import LLM, AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams
from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray.errors import InvalidRequest, RequestFailed
from eagleray.grammars.llguidance_compiler import LLGuidanceCompiler
from eagleray.grammars.matcher import GrammarCompiler, mask_words
from eagleray.messages.structured_outputs import StructuredOutputsParams
from eagleray_bench.alternating_runs import AlternatingRuns

VOCAB_SIZE = 151_936
EOS_TOKEN_ID = 0
NUM_REQUESTS = 16
BACKENDS = ("llguidance", "xgrammar")

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
            "required": ["street", "city"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
RECORD_TEXT = (
    '{"name": "Ada Lovelace", "age": 36, "email": "ada@example.com", "tags": ["mathematics", "first programmer"], '
    '"address": {"street": "12 St James Square, near the park", "city": "London"}}'
)
CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["get_weather", "search", "calculate"]}, "arguments": {"type": "object"}},
    "required": ["name", "arguments"],
}
CALL_TEXT = '{"name": "search", "arguments": {"query": "the capital of France", "limit": 10, "deep": {"a": [1, 2.5]}}}'
SUMMARY = {"type": "object", "properties": {"summary": {"type": "string", "maxLength": 300}}, "required": ["summary"]}
SUMMARY_TEXT = '{"summary": "A long text, with many words; some of them are rare: antidisestablishmentarianism."}'
USUAL: dict[str, tuple[dict[str, Any], str]] = {
    "record": ({"json": RECORD}, RECORD_TEXT),
    "tool call": ({"json": CALL}, CALL_TEXT),
    "JSON object": ({"json_object": True}, CALL_TEXT),
    "summary": ({"json": SUMMARY}, SUMMARY_TEXT),
    "choice": ({"choice": ["positive", "negative", "neutral"]}, "neutral"),
    "sentence": ({"regex": r"[^.]{3,80}\."}, "The quick brown fox jumps over the lazy dog, and sleeps."),
    "expression": ({"regex": r"[0-9]{4}-[0-9]{2}-[0-9]{2} [a-z]{2,20} [A-Z0-9]+"}, "2026-11-23 received X17B"),
}
"""Constraints of usual requests, and a text of each."""

ENDLESS = {"type": "array", "items": RECORD, "minItems": 500}
"""Schema of texts that are longer than any answer of this benchmark."""


def hostile(number: int) -> dict[str, dict[str, Any]]:
    """Return hostile constraints by name, other ones for each number, so that none has been compiled before."""
    parts = [{"anyOf": [{"properties": {f"p{number}_{i}_{j}": {}}} for j in range(20)]} for i in range(8)]
    patterns = {f"p{number}_{i}": {"pattern": "([a-z]{9}x?){90}"} for i in range(2000)}
    return {
        "expression of a million letters": {"regex": f"{number}a{{1000000}}"},
        "nested repetition": {"regex": f"{number}(a{{1000}}){{1000}}"},
        "ambiguous expression": {"regex": f"{number}" + "(a|aa|aaa)*b" * 50 + "[ab]{500}(c|[a-z]){500}"},
        "product of objects": {"json": {"allOf": parts}},
        "2,000 expressions": {"json": {"properties": patterns}},
        "ambiguous rules": {"grammar": f'start: "{number}" a a a\na: a a | a a a | "x" | ""'},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["masks", "tokens", "hostile"])
    parser.add_argument("--backend", nargs="+", default=["llguidance"], choices=BACKENDS)
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--model", nargs="+", default=["demo", "dense-0.6b"], choices=["demo", *SHAPES])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    arguments = parser.parse_args()
    if arguments.trial:
        arguments.repeat, arguments.seconds, arguments.tokens, arguments.model = 1, 3.0, 16, ["demo"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    match arguments.part:
        case "masks":
            tokenizer = arguments.tokenizer or large_tokenizer(arguments.directory)
            for backend in arguments.backend:
                measure_masks(backend, tokenizer, arguments.repeat)
        case "tokens":
            for name in arguments.model:
                measure_tokens(name, arguments)
        case "hostile":
            asyncio.run(measure_hostile(arguments.seconds, arguments.threads))


def large_tokenizer(directory: Path) -> Path:
    """Return the file of a tokenizer with `VOCAB_SIZE` tokens, which is trained now unless it exists."""
    path = directory / "tokenizer-152k.json"
    if not path.exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=["<|endoftext|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            max_token_length=24,  # sources have more long names than texts
            show_progress=False,
        )
        tokenizer.train_from_iterator(sources(), trainer)
        path.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(path))
    return path


def sources() -> Iterator[str]:
    """Yield the sources of Python's library and of transformers."""
    paths = sysconfig.get_paths()
    library, packages = Path(paths["stdlib"]), Path(paths["purelib"], "transformers")
    for path in sorted([*library.glob("*.py"), *library.glob("*/*.py"), *packages.rglob("*.py")]):
        yield path.read_text("utf-8", "replace")


def open_compiler(backend: str, tokenizer_json: str, eos_token_id: int) -> GrammarCompiler:
    """Return a compiler of the backend for `VOCAB_SIZE` tokens."""
    options: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "eos_token_ids": [eos_token_id]}
    if backend == "llguidance":
        return LLGuidanceCompiler(tokenizer_json, **options)
    from eagleray.grammars.xgrammar_compiler import XGrammarCompiler

    return XGrammarCompiler(tokenizer_json, **options)


def measure_masks(backend: str, path: Path, num_runs: int) -> None:
    """Print times of compilation and of masks."""
    tokenizer = Tokenizer.from_file(str(path))
    eos_token_id = tokenizer.token_to_id("<|endoftext|>")
    began = time.perf_counter()
    compiler = open_compiler(backend, path.read_text(), eos_token_id)
    print(f"{backend}: ready after {time.perf_counter() - began:.2f} s, with {import_seconds(backend)}")
    print("  compile ms | us for each mask: median, mean, 99th percentile | tokens")
    mask = np.zeros(mask_words(VOCAB_SIZE), dtype=np.int32)
    medians = []
    for name, (constraint, text) in USUAL.items():
        began = time.perf_counter()
        try:
            compiled = compiler.compile(StructuredOutputsParams(**constraint).to_grammar())
        except InvalidRequest as error:
            print(f"  {name:<14} refused: {error}")
            continue
        compile_seconds = time.perf_counter() - began
        token_ids = tokenizer.encode(text).ids
        times = []
        for _ in range(num_runs):
            matcher = compiled.matcher()
            for token_id in token_ids:
                began = time.perf_counter()
                matcher.fill_mask(mask)
                times.append(1e6 * (time.perf_counter() - began))
                matcher.accept([token_id])
                assert matcher.failure is None, f"{name}: {matcher.failure}"
        medians.append(statistics.median(times))
        figures = (1e3 * compile_seconds, medians[-1], statistics.mean(times), float(np.percentile(times, 99)))
        print(f"  {name:<14}" + "".join(f"{figure:>10.1f}" for figure in figures) + f"{len(token_ids):>6}")
    print(f"  median of the medians: {statistics.median(medians):.1f} us")


def import_seconds(backend: str) -> str:
    """Return the time and memory that the import of the library takes in a new process."""
    program = (
        "import numpy, os, sys, time; from process_memory import anonymous_bytes; "
        f"before = anonymous_bytes(os.getpid()); began = time.perf_counter(); import {backend}; "
        "seconds = time.perf_counter() - began; "
        "print(seconds, anonymous_bytes(os.getpid()) - before, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    seconds, size, has_torch = done.stdout.split()
    return f"{float(seconds):.2f} s and {int(size) / 2**20:.0f} MiB for its import (torch imported: {has_torch})"


def measure_tokens(name: str, arguments: argparse.Namespace) -> None:
    """Print the time per token of 16 requests with and without a grammar."""
    constraints = {"free": None, "record": ENDLESS}
    options = {"max_model_len": 1024, "num_threads": arguments.threads, "enable_prefix_caching": False}
    seconds: dict[str, list[float]] = {variant: [] for variant in constraints}
    with LLM(str(checkpoint(name, arguments.directory)), **options) as llm:
        for schema in constraints.values():  # warm-up
            run(llm, schema, arguments.tokens)
        for variant in AlternatingRuns(count=arguments.repeat).order(list(constraints)):
            schema = constraints[variant]
            long, short = run(llm, schema, arguments.tokens), run(llm, schema, 1)
            seconds[variant].append((long - short) / (arguments.tokens - 1))
    print(
        f"{name}: ms per token of {NUM_REQUESTS} requests, {arguments.repeat} runs in turn: "
        "median (lowest to highest); ratio"
    )
    free = statistics.median(seconds["free"])
    for variant, times in seconds.items():
        median, spread = statistics.median(times), f"({1e3 * min(times):.2f} to {1e3 * max(times):.2f})"
        print(f"  {variant:<10}{1e3 * median:>9.3f} {spread:<22}{median / free:.3f}")


def checkpoint(name: str, directory: Path) -> Path:
    """Return a checkpoint whose vocabulary has a token for each of the model's ids."""
    if name == "demo":
        return DEMO_MODEL_DIR
    plain = make(name, directory)
    if SHAPES[name]["vocab_size"] != VOCAB_SIZE:
        return plain
    path = directory / f"{name}-152k"
    path.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if not (path / file.name).exists():
            (path / file.name).symlink_to(large_tokenizer(directory) if file.name == "tokenizer.json" else file)
    return path


def run(llm: LLM, schema: dict[str, Any] | None, num_tokens: int) -> float:
    """Return the seconds for this many tokens of each request."""
    constraint = None if schema is None else StructuredOutputsParams(json=schema)
    prompts = [{"prompt_token_ids": [5 + i] * 16} for i in range(NUM_REQUESTS)]
    params = [
        SamplingParams(temperature=1, seed=i, max_tokens=num_tokens, ignore_eos=True, structured_outputs=constraint)
        for i in range(NUM_REQUESTS)
    ]
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(output.outputs[0].token_ids) == num_tokens for output in outputs)
    return seconds


async def measure_hostile(seconds: float, threads: int | None) -> None:
    """Print time and memory of each hostile grammar, the time to the first token with a new schema, and the gaps of a
    stream while nothing else runs, and while others send new schemas or hostile grammars."""
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(num_threads=threads, max_model_len=2048))
    try:
        await first_token_seconds(llm, {"choice": ["yes"]})  # loads the compiler
        print("ms until a hostile grammar is refused or followed, and memory")
        for name, constraint in hostile(0).items():
            with PeakMemory(os.getpid()) as memory:
                await asyncio.sleep(0.3)
                before, began = memory.peak_bytes, time.perf_counter()
                outcome = await outcome_of(llm, constraint)
                milliseconds = 1e3 * (time.perf_counter() - began)
                await asyncio.sleep(0.1)
            print(
                f"  {name:<34}{milliseconds:>8.0f} ms {(memory.peak_bytes - before) / 2**20:>6.0f} MiB  {outcome[:70]}"
            )
        free = [1e3 * await first_token_seconds(llm, None) for _ in range(20)]
        new = [1e3 * await first_token_seconds(llm, new_schema(number)) for number in range(20)]
        print(
            f"ms to the first token, median of 20: {statistics.median(free):.1f} without a grammar, "
            f"{statistics.median(new):.1f} with a new schema"
        )
        print(f"ms between the tokens of a stream of {seconds:.0f} s: median, 99th percentile, highest")
        await measure_gaps(llm, "nothing else", seconds, iter(()))
        await measure_gaps(llm, "free requests", seconds, repeat(None))
        await measure_gaps(llm, "new schemas", seconds, map(new_schema, count(20)))
        grammars = (constraint for number in count(1) for constraint in hostile(number).values())
        await measure_gaps(llm, "hostile grammars", seconds, grammars)
    finally:
        llm.shutdown()


def new_schema(number: int) -> dict[str, Any]:
    """Return a constraint that is another one for each number."""
    return {"json": RECORD | {"maxProperties": 10 + number}}


async def measure_gaps(llm: AsyncLLM, name: str, seconds: float, constraints: Iterator[dict[str, Any] | None]) -> None:
    """Print the gaps between the tokens of a stream while requests with these constraints are sent, one by one."""
    stop = asyncio.Event()

    async def disturb() -> None:
        for constraint in constraints:
            await outcome_of(llm, constraint)
            if stop.is_set():
                return

    disturbance = asyncio.create_task(disturb())
    gaps: list[float] = []
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends:
        params = SamplingParams(temperature=0, max_tokens=1024, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
        last: float | None = None
        async for _ in llm.generate("Once upon a time", params):
            now = time.perf_counter()
            if last is not None:
                gaps.append(1e3 * (now - last))
            last = now
    stop.set()
    await disturbance
    print(f"  {name:<20}" + "".join(f"{figure:>9.2f}" for figure in (*np.percentile(gaps, [50, 99]), max(gaps))))


async def first_token_seconds(llm: AsyncLLM, constraint: dict[str, Any] | None) -> float:
    """Return the time of a request for one token."""
    return await request_seconds(llm, constraint, max_tokens=1)


async def request_seconds(llm: AsyncLLM, constraint: dict[str, Any] | None, max_tokens: int) -> float:
    """Return the time of a request."""
    structured = constraint and StructuredOutputsParams(**constraint)
    params = SamplingParams(temperature=1, seed=0, max_tokens=max_tokens, structured_outputs=structured)
    began = time.perf_counter()
    async for _ in llm.generate("Once upon a time", params):
        pass
    return time.perf_counter() - began


async def outcome_of(llm: AsyncLLM, constraint: dict[str, Any] | None) -> str:
    """Return the reason why a grammar is refused or fails within a few tokens, or "followed"."""
    try:
        await request_seconds(llm, constraint, max_tokens=8)
    except (InvalidRequest, RequestFailed) as error:
        return str(error)
    return "followed"


if __name__ == "__main__":
    main()
