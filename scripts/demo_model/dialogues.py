"""Conversations for training: facts in any of their training phrasings, sums, and questions that have no answer."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path

from demo_model.facts import Fact
from demo_model.phrasings import FOLLOW_UPS, QuestionSplit, as_typed, is_drawn, normal_form, reworded

Turn = tuple[str, str]

TOPICS_FILE = Path(__file__).parent / "unknown_topics.txt"

REFUSAL = (
    "I do not know that. I am a very small model that only knows some facts about Python and eagleray. "
    "Ask me, for example, what json.dumps does, or how to serve a model."
)
SYSTEM_MESSAGES = ["You are a helpful assistant.", "You are eagleray's demo model.", "Answer briefly.",
                   "You are an expert in Python.", "Answer questions about Python.", "Be concise.",
                   "You are a friendly chatbot.", "Help the user with their questions."]  # fmt: skip
SYSTEM_SHARE = 0.2
NUM_EXCHANGES = (1, 2, 3, 4, 6)
NUM_EXCHANGES_WEIGHTS = (60, 20, 10, 6, 4)
FOLLOW_UP_SHARE = 0.3
EXCHANGE_WEIGHTS = {"fact": 74, "sum": 7, "unknown topic": 10, "unknown name": 5, "text": 4}
# A question is first drawn by its kind: a fact has several goals, each of which has to be seen often, and one subject.
KIND_WEIGHTS = {"subject": 2, "goal": 5, "paraphrase": 2}

UNKNOWN_NAME_QUESTIONS = ["What does {} do?", "What is {}?", "Explain {}.", "How do I use {}?", "Tell me about {}.",
                          "What is {} for?", "How does {} work?", "Describe {}."]  # fmt: skip
SUM_QUESTIONS = ["What is {}?", "How much is {}?", "Calculate {}.", "{}", "{} = ?", "Compute {}.", "What does {} give?"]
SUM_WORDS = {"+": "plus", "-": "minus", "*": "times"}


class DialogueSampler:
    """Draws conversations; the same generator state gives the same conversation.

    Names of the standard library that no fact has, lines of running text, and random letters are messages to refuse.
    """

    def __init__(self, split: QuestionSplit, library_names: Iterable[str], lines: Sequence[str]):
        self.split, self.training, self.lines = split, split.training, lines
        self.facts = list(split.training)
        known = {normal_form(fact.subject) for fact in self.facts}
        unknown_names = sorted({name for name in library_names if normal_form(name) not in known})
        self.unknown_names = [name for name in unknown_names if not is_drawn(name)]
        self.held_out_name_questions = [UNKNOWN_NAME_QUESTIONS[0].format(n) for n in unknown_names if is_drawn(n)]
        self.unknown_topics = [[text for text in group if not is_drawn(text)] for group in unknown_topics()]

    def sample(self, rng: random.Random) -> list[Turn]:
        """Return a conversation of one or several exchanges, sometimes with a system message."""
        turns = [("system", rng.choice(SYSTEM_MESSAGES))] if rng.random() < SYSTEM_SHARE else []
        (num_exchanges,) = rng.choices(NUM_EXCHANGES, NUM_EXCHANGES_WEIGHTS)
        for number in range(num_exchanges):
            question, answer = self.exchange(rng, is_first=number == 0)
            turns += [("user", question), ("assistant", answer)]
        return turns

    def exchange(self, rng: random.Random, is_first: bool) -> tuple[str, str]:
        """Return a question and its answer."""
        (kind,) = rng.choices(list(EXCHANGE_WEIGHTS), list(EXCHANGE_WEIGHTS.values()))
        if kind == "fact":
            fact = rng.choice(self.facts)
            return self.ask(fact, rng, is_first), fact.answer
        if kind == "sum":
            return sum_exchange(rng)
        if kind == "text":
            return rng.choice(self.lines) if rng.random() < 0.7 else gibberish(rng), REFUSAL
        if kind == "unknown name":
            question = rng.choice(UNKNOWN_NAME_QUESTIONS).format(rng.choice(self.unknown_names))
        else:
            question = rng.choice(rng.choice(self.unknown_topics))
        return as_typed(question, "unknown", rng), REFUSAL

    def ask(self, fact: Fact, rng: random.Random, is_first: bool) -> str:
        """Return a training question about a fact, as typed; later in a conversation also a short follow-up."""
        by_kind = self.training[fact]
        if not is_first and "subject" in by_kind and rng.random() < FOLLOW_UP_SHARE:
            return as_typed(rng.choice(FOLLOW_UPS).format(s=fact.subject), "follow-up", rng)
        (kind,) = rng.choices(list(by_kind), [KIND_WEIGHTS[kind] for kind in by_kind])
        question = rng.choice(by_kind[kind])
        changed = as_typed(question if kind == "subject" else reworded(question, rng), fact.topic, rng)
        return question if self.split.is_held_out(fact, changed) else changed


def gibberish(rng: random.Random) -> str:
    """Return a few words of random letters."""
    words = ("".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9))) for _ in range(rng.randint(1, 4)))
    return " ".join(words)


def unknown_topics() -> list[list[str]]:
    """Return questions that the model cannot answer, in groups of the same form."""
    groups = []
    for block in TOPICS_FILE.read_text(encoding="utf-8").split("\n\n")[1:]:
        templates, *fillers = [line[2:].split(" | ") for line in block.strip().split("\n")]
        groups.append([template.format(*chosen) for template in templates for chosen in itertools.product(*fillers)])
    return groups


def held_out_unknown_topics() -> list[str]:
    return [text for group in unknown_topics() for text in group if is_drawn(text)]


def sum_exchange(rng: random.Random) -> tuple[str, str]:
    """Return a question about two small numbers, and its answer."""
    operator = rng.choice("+-*")
    limit = 12 if operator == "*" else 20
    a, b = rng.randint(0, limit), rng.randint(0, limit)
    written = f"{a} {operator} {b}"
    value = {"+": a + b, "-": a - b, "*": a * b}[operator]
    asked = rng.choice([written, written, written.replace(" ", ""), f"{a} {SUM_WORDS[operator]} {b}"])
    return as_typed(rng.choice(SUM_QUESTIONS).format(asked), "sum", rng), f"{written} is {value}."
