"""Time of requests with and without speculative decoding, in turn on engines with the same weights.

python benchmarks/speculation.py [--model dense-0.6b] [--workload copy text …] [--rounds 3]
                                 [--tokens 128] [--threads N] [--executor processes]

Weights are random, and the texts are forced upon the model (`trace_decode_token_ids`), so that the cost of a step is
that of a model of this size, and the text is one that a useful model writes: `copy` edits sources of the prompt,
`samples` are drawn by the embedded demo model for one prompt, in groups one after another, with an entropy of 3 nats
for each token, and `likely` too, at temperature 0.5, with 1.1 nats, which is nearer to that of large models; `repeat`
writes the answers of the group before once more; `text` is prose, and `random` never repeats itself. Every round has
other texts. The prompts are in the prefix cache, so that decoding is measured. On a machine that others use, times say
little: `drafting.py` runs the scheduler alone, with given times of steps.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shapes import SHAPES, make
from tokenizers import Tokenizer

from eagleray import LLM, SamplingParams
from eagleray.config.resolve import DEMO_MODEL_DIR
from eagleray_bench.alternating_runs import AlternatingRuns

PROMPT_TOKENS = 512
EDITED_LINES = 0.08
METHODS: dict[str, dict[str, Any]] = {
    "off": {},
    "ngram": {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5},
    "suffix": {"method": "suffix", "num_speculative_tokens": 8},
}


class Case(NamedTuple):
    """A request: the tokens of its prompt and those that it generates."""

    prompt: list[int]
    output: list[int]


Group = list[Case]
"""Requests that are sent together."""


class Texts:
    """Makes the requests of each workload. `num_tokens`: tokens that each generates."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
        library = Path(sysconfig.get_path("stdlib"))
        self._sources = [path.read_text(errors="ignore") for path in sorted(library.glob("*.py"))]
        docs = Path(__file__).parent.parent / "docs"
        self._prose = "\n".join(path.read_text() for path in sorted(docs.glob("*.md")))
        self._demo: LLM | None = None

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def copy(self, choose: random.Random, count: int) -> list[Group]:
        """Sources that are written again, with a few lines changed."""
        group = []
        while len(group) < count:
            lines = choose.choice(self._sources).splitlines(keepends=True)
            start = choose.randrange(max(1, len(lines) - 60))
            part = lines[start : start + 60]
            edited = [
                f"    {choose.choice('abcdefgh')}{choose.randrange(99)} = {choose.randrange(999)}\n"
                if choose.random() < EDITED_LINES
                else line
                for line in part
            ]
            prompt, output = self.encode("".join(part))[:PROMPT_TOKENS], self.encode("".join(edited))
            if len(output) >= self._num_tokens and len(prompt) >= self._num_tokens:
                group.append(Case(prompt, output[: self._num_tokens]))
        return [group]

    def text(self, choose: random.Random, count: int) -> list[Group]:
        """Consecutive prose."""
        group = []
        for _ in range(count):
            start = choose.randrange(len(self._prose) - 8 * (PROMPT_TOKENS + self._num_tokens))
            ids = self.encode(self._prose[start : start + 8 * (PROMPT_TOKENS + self._num_tokens)])
            group.append(Case(ids[:PROMPT_TOKENS], ids[PROMPT_TOKENS:][: self._num_tokens]))
        return [group]

    def random(self, choose: random.Random, count: int) -> list[Group]:
        """Random tokens."""
        draw = lambda length: [choose.randrange(10, self._vocab_size) for _ in range(length)]  # noqa: E731
        return [[Case(draw(PROMPT_TOKENS), draw(self._num_tokens)) for _ in range(count)]]

    def samples(self, choose: random.Random, count: int, temperature: float = 1.0) -> list[Group]:
        """Samples of one prompt, four groups of `count` one after another."""
        if self._demo is None:
            self._demo = LLM(log_level="error", num_threads=1)
        name = choose.choice(["json.dumps", "os.path.join", "itertools.chain", "re.sub", "asyncio.gather", "str.split"])
        prompt = self.encode(f"What does {name} do? Explain it ({choose.randrange(999)}), with an example.")
        params = SamplingParams(
            temperature=temperature,
            seed=choose.randrange(2**30),
            n=4 * count,
            max_tokens=self._num_tokens,
            ignore_eos=True,
        )
        (answer,) = self._demo.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        cases = [Case(prompt, list(output.token_ids)) for output in answer.outputs]
        return [cases[first : first + count] for first in range(0, len(cases), count)]

    def likely(self, choose: random.Random, count: int) -> list[Group]:
        """Samples as a model draws them that is surer of its tokens."""
        return self.samples(choose, count, temperature=0.5)

    def repeat(self, choose: random.Random, count: int) -> list[Group]:
        """Samples of one prompt, and twice the same again."""
        group = self.samples(choose, count)[0]
        return [group, group, group]

    def close(self) -> None:
        if self._demo is not None:
            self._demo.close()


WORKLOADS: dict[str, tuple[Callable[[Texts, random.Random, int], list[Group]], tuple[int, ...]]] = {
    "copy": (Texts.copy, (1, 8)),
    "samples": (Texts.samples, (1, 4)),
    "likely": (Texts.likely, (1, 4)),
    "repeat": (Texts.repeat, (1, 4)),
    "text": (Texts.text, (1, 8)),
    "random": (Texts.random, (1, 16)),
}
"""Workloads, and the numbers of requests at the same time."""


def run(llm: LLM, groups: list[Group]) -> float:
    """Return the seconds for all groups, one after another, without those for the prompts."""
    seconds = 0.0
    for group in groups:
        prompts = [{"prompt_token_ids": case.prompt} for case in group]
        llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0), use_tqdm=False)
        params = [
            SamplingParams(
                temperature=0, max_tokens=len(case.output), ignore_eos=True, trace_decode_token_ids=case.output
            )
            for case in group
        ]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds += time.perf_counter() - began
        for case, output in zip(group, outputs, strict=True):
            assert list(output.outputs[0].token_ids) == case.output
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SHAPES), default="dense-0.6b")
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--method", nargs="+", choices=list(METHODS)[1:], default=list(METHODS)[1:])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--executor", default="auto")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-shapes")
    arguments = parser.parse_args()
    checkpoint = make(arguments.model, arguments.directory)
    options = {
        "max_model_len": 2048,
        "kv_cache_memory": "1GiB",
        "num_threads": arguments.threads,
        "executor": arguments.executor,
        "log_level": "error",
    }
    texts = Texts(arguments.tokens, min(8000, SHAPES[arguments.model]["vocab_size"]))
    methods = ["off", *arguments.method]
    llms = {name: LLM(str(checkpoint), speculative_config=METHODS[name], **options) for name in methods}
    print(
        f"{arguments.model}: ms per token of each request, median of {arguments.rounds} rounds; speed-up by the medians"
    )
    try:
        for workload in arguments.workload:
            make_groups, counts = WORKLOADS[workload]
            for count in counts:
                name = f"{workload} x {count}"
                measure(llms, arguments.rounds, name, lambda c: make_groups(texts, c, count))  # noqa: B023
    finally:
        texts.close()
        for llm in llms.values():
            llm.close()


def measure(llms: dict[str, LLM], rounds: int, name: str, groups_of: Callable[[random.Random], list[Group]]) -> None:
    """Print the figures of one workload."""
    seconds: dict[str, list[float]] = {method: [] for method in llms}
    for method in AlternatingRuns(count=rounds).order(list(llms)):
        groups = groups_of(random.Random(f"{name} {len(seconds[method])}"))
        num_tokens = sum(len(group[0].output) for group in groups)
        seconds[method].append(run(llms[method], groups) / num_tokens)
    off = seconds["off"]
    figures = []
    for method, times in seconds.items():
        ratio = statistics.median(before / after for before, after in zip(off, times, strict=True))
        figures.append(f"{method} {1e3 * statistics.median(times):7.2f} ({ratio:.2f})")
    print(f"  {name:<14}" + "   ".join(figures))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
