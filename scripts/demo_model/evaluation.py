"""Evaluation of the exported model as users meet it: served by eagleray, greedily and at its default parameters."""

from __future__ import annotations

import itertools
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from demo_model.corpus import build_corpus
from demo_model.dialogues import (
    REFUSAL,
    DialogueSampler,
    Turn,
    gibberish,
    held_out_unknown_topics,
    sum_exchange,
)
from demo_model.facts import choose_facts
from demo_model.phrasings import FOLLOW_UPS, split_questions
from eagleray import LLM, SamplingParams

HELD_OUT = ("subject", "goal", "paraphrase")
ALL_HELD_OUT = "all held-out phrasings"
MIN_RIGHT = 0.80
MAX_TOKENS = 512
MAX_LINE_REPEATS = 3
LOOP_PROMPTS = {"held-out phrasings": 100, "unknown topic": 60, "unknown name": 15, "text": 15, "gibberish": 10}
NUM_OTHERS = 150
"""Number of questions of each kind that is not a held-out phrasing."""

REFUSAL_KEY = "I do not know that"


@dataclass(frozen=True)
class Probe:
    """Conversation up to a question, its right answer, and the words that an answer must contain."""

    kind: str
    turns: tuple[Turn, ...]
    answer: str
    keys: tuple[str, ...]

    def is_right(self, text: str) -> bool:
        return all(key.lower() in text.lower() for key in self.keys)

    def is_exact(self, text: str) -> bool:
        return text.lower().split() == self.answer.lower().split()


@dataclass(frozen=True)
class Share:
    """Number of questions, and how many were answered right, and word for word."""

    count: int
    right: int
    exact: int

    def __str__(self) -> str:
        return f"{self.right / self.count:.1%} ({self.exact / self.count:.1%})"


@dataclass(frozen=True)
class Evaluation:
    """Right answers by kind of question, greedy and at the default parameters, and answers that loop there."""

    greedy: dict[str, Share]
    sampled: dict[str, Share]
    num_loop_prompts: int
    loops: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether the model may be shipped."""
        shares = (self.greedy[ALL_HELD_OUT], self.sampled[ALL_HELD_OUT])
        return not self.loops and all(share.right >= MIN_RIGHT * share.count for share in shares)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = ["questions: number, right (word for word) greedily, at the default parameters"]
        lines += [f"{kind}: {share.count}, {share}, {self.sampled[kind]}" for kind, share in self.greedy.items()]
        lines += [f"{len(self.loops)} of {self.num_loop_prompts} answers loop", *self.loops]
        return "\n".join(lines)


def evaluate(checkpoint: Path, limit: int | None = None, num_facts: int | None = None) -> Evaluation:
    """Ask a checkpoint held-out questions, at most `limit` of each kind, about the facts that it has learned."""
    split = split_questions(choose_facts(num_facts))
    corpus, held_out_corpus = build_corpus()
    sampler = DialogueSampler(split, corpus.names, corpus.lines())
    probes = make_probes(sampler, limit)
    prompts = loop_prompts(probes, held_out_corpus.lines())
    with LLM(str(checkpoint)) as llm:
        seeds = range(max(len(probes), len(prompts)))
        defaults = [llm.get_default_sampling_params(max_tokens=MAX_TOKENS, seed=seed) for seed in seeds]
        conversations = [probe.turns for probe in probes]
        greedy = answers(llm, conversations, [SamplingParams(temperature=0, max_tokens=MAX_TOKENS)] * len(probes))
        sampled = answers(llm, conversations, defaults[: len(probes)])
        free = answers(llm, prompts, defaults[: len(prompts)])
    loops = [f"{turns[-1][1]!r}: {text!r}" for turns, (text, count) in zip(prompts, free, strict=True)
             if count >= MAX_TOKENS or repeats_a_line(text)]  # fmt: skip
    return Evaluation(shares(probes, greedy), shares(probes, sampled), len(prompts), loops)


def make_probes(sampler: DialogueSampler, limit: int | None = None) -> list[Probe]:
    """Return held-out questions alone and at the end of a conversation, follow-ups, sums, and unknown things."""
    rng = random.Random(0)
    held_out = sampler.split.held_out
    probes = [Probe(p.kind, (("user", p.text),), p.fact.answer, p.fact.keys) for p in held_out]
    for _ in range(NUM_OTHERS):
        exchanges = [sampler.exchange(rng, number == 0) for number in range(rng.randint(1, 3))]
        history = tuple(turn for question, answer in exchanges for turn in (("user", question), ("assistant", answer)))
        phrasing = rng.choice(held_out)
        asked: Turn = ("user", phrasing.text)
        probes.append(Probe("in a conversation", (*history, asked), phrasing.fact.answer, phrasing.fact.keys))
        fact = rng.choice([fact for fact, by_kind in sampler.training.items() if "subject" in by_kind])
        asked = ("user", rng.choice(FOLLOW_UPS).format(s=fact.subject))
        probes.append(Probe("follow-up", (*history, asked), fact.answer, fact.keys))
        question, answer = sum_exchange(rng)
        probes.append(Probe("sum", (("user", question),), answer, (answer,)))
    unknown = {"unknown topic": held_out_unknown_topics(), "unknown name": sampler.held_out_name_questions}
    for kind, questions in unknown.items():
        chosen = rng.sample(questions, NUM_OTHERS)
        probes += [Probe(kind, (("user", question),), REFUSAL, (REFUSAL_KEY,)) for question in chosen]
    rng.shuffle(probes)
    places: dict[str, itertools.count[int]] = defaultdict(itertools.count)
    return [probe for probe in probes if next(places[probe.kind]) < (limit or len(probes))]


def loop_prompts(probes: Sequence[Probe], texts: Sequence[str]) -> list[tuple[Turn, ...]]:
    """Return questions of the model's subjects, questions of others, lines of text, and random letters."""
    rng = random.Random(0)
    pools: dict[str, list[tuple[Turn, ...]]] = {"text": [(("user", text),) for text in texts]}
    pools["gibberish"] = [(("user", gibberish(rng)),) for _ in range(LOOP_PROMPTS["gibberish"])]
    for probe in probes:
        pools.setdefault("held-out phrasings" if probe.kind in HELD_OUT else probe.kind, []).append(probe.turns)
    counts = {kind: min(count, len(pools[kind])) for kind, count in LOOP_PROMPTS.items()}
    return [turns for kind, count in counts.items() for turns in rng.sample(pools[kind], count)]


def answers(llm: LLM, conversations: Sequence[Sequence[Turn]], params: list[SamplingParams]) -> list[tuple[str, int]]:
    """Return the text of each answer and its number of tokens."""
    messages = [[{"role": role, "content": text} for role, text in turns] for turns in conversations]
    outputs = llm.chat(messages, params, use_tqdm=False)
    return [(output.outputs[0].text, len(output.outputs[0].token_ids)) for output in outputs]


def repeats_a_line(text: str) -> bool:
    lines = Counter(line.strip() for line in text.split("\n") if line.strip())
    return any(count > MAX_LINE_REPEATS for count in lines.values())


def shares(probes: Sequence[Probe], given: Sequence[tuple[str, int]]) -> dict[str, Share]:
    """Count right and exact answers by kind, and over all held-out phrasings."""
    results: dict[str, list[tuple[bool, bool]]] = {ALL_HELD_OUT: []}
    for probe, (text, _) in zip(probes, given, strict=True):
        result = (probe.is_right(text), probe.is_exact(text))
        results.setdefault(probe.kind, []).append(result)
        if probe.kind in HELD_OUT:
            results[ALL_HELD_OUT].append(result)
    return {
        kind: Share(len(found), sum(right for right, _ in found), sum(exact for _, exact in found))
        for kind, found in sorted(results.items())
    }
