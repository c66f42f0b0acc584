"""Questions about a fact: from templates and from its own phrases, divided into training and held-out ones.

The division depends on the texts alone. Three kinds of phrasings are held out, and counted apart: `subject` and `goal`,
where the template and what fills it were both seen in training, but never together; and `paraphrase`, a wording of the
question that was not seen in any form.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache

from demo_model.facts import Fact

HELD_OUT_PERCENT = 15
MIN_PHRASES_TO_HOLD_ONE_OUT = 3

ABOUT = ["What is {s}?", "Explain {s}.", "Tell me about {s}.", "Describe {s}.", "Can you explain {s}?", "{s}",
         "What do you know about {s}?", "Could you tell me what {s} is?", "I do not understand {s}.",
         "Give me a short explanation of {s}.", "What is {s} for?", "Do you know {s}?", "Explain {s} to me.",
         "I have a question about {s}.", "What can you tell me about {s}?", "help {s}"]  # fmt: skip
USE = ["What does {s} do?", "What is {s} used for?", "How does {s} work?", "When do I need {s}?", "How do I use {s}?",
       "What is the purpose of {s}?", "Could you tell me what {s} does?", "When should I use {s}?",
       "Why would I use {s}?", "Tell me what {s} does."]  # fmt: skip
TEMPLATES = {
    "name": [*ABOUT, *USE, "What happens when I call {s}?", "What does the function {s} do?", "What does {s} return?"],
    "module": [*ABOUT, *USE, "What is the module {s} for?", "What does the {s} module do?", "What is the {s} module?",
               "What can I do with {s}?", "Why should I import {s}?", "Tell me about the module {s}."],
    "keyword": [*ABOUT, *USE, "What does the keyword {s} mean?", "What does {s} mean in Python?",
                "What is the statement {s} for?", "What is the meaning of {s}?"],
    "error": [*ABOUT, "What does {s} mean?", "When is {s} raised?", "Why do I get a {s}?", "What causes a {s}?",
              "My program ends with a {s}.", "What is the reason for a {s}?", "When does Python raise {s}?",
              "How do I get a {s}?"],
    "term": [*ABOUT, "What does {s} mean?", "What is meant by {s}?", "How would you define {s}?",
             "What is the meaning of {s}?", "What is the idea of {s}?"],
    "flag": [*ABOUT, *USE, "What does the option {s} do?", "What is the flag {s} for?", "What does {s} change?",
             "What is the effect of {s}?", "What happens with {s}?"],
    "route": [*ABOUT, *USE, "What does the route {s} do?", "What does a request to {s} return?", "What is at {s}?",
              "What does the endpoint {s} do?", "When do I call {s}?"],
    "how": [],
    "ask": [],
    "talk": [],
}  # fmt: skip
GOALS = ["How do I {g}?", "How can I {g}?", "How to {g}?", "What is the way to {g}?", "I want to {g}.",
         "I need to {g}.", "What should I use to {g}?", "Show me how to {g}.", "Is there a way to {g}?",
         "Tell me how to {g}.", "{g}",
         "What do I use to {g}?", "Can you tell me how to {g}?", "How would I {g}?", "What is a good way to {g}?",
         "I would like to {g}.", "How does one {g}?", "Could you show me how to {g}?"]  # fmt: skip
PLACES = {"python": ["in Python", "with Python", "in a Python program"], "eagleray": ["with eagleray", "in eagleray"]}
FOLLOW_UPS = ["And {s}?", "What about {s}?", "Thanks. And {s}?", "And what is {s}?", "How about {s}?"]
OPENINGS = ["Please", "Hi,", "Hello,", "Hey,", "Quick question:", "A question:", "OK,", "Sorry,"]
# Words that mean the same in most questions.
SYNONYMS = [
    ("get", "find", "obtain", "determine", "know"), ("make", "create", "build", "write"), ("delete", "remove", "erase"),
    ("convert", "turn", "transform", "change"), ("check", "test", "see", "find out", "tell"), ("whether", "if"),
    ("show", "print", "display", "output"), ("text", "string"), ("list", "array"), ("dictionary", "dict"),
    ("loop over", "iterate over", "go through", "run through"), ("item", "element", "entry"), ("letter", "character"),
    ("join", "connect", "concatenate", "combine"), ("run", "execute", "start", "launch"), ("program", "script", "code"),
    ("end", "stop", "finish", "quit"), ("several", "multiple", "many"), ("compute", "calculate", "work out"),
    ("error", "exception"), ("split", "divide", "break up", "separate"), ("search for", "look for", "find"),
    ("folder", "directory"), ("read", "load"), ("save", "store", "write"), ("server", "service"), ("use", "work with"),
    ("file name", "filename"), ("number", "value"), ("called", "named"), ("remove", "drop", "get rid of"),
    ("all", "every"), ("maximum", "largest"), ("minimum", "smallest"), ("start", "beginning"), ("happens", "occurs"),
    ("two", "2"), ("ten", "10"), ("function", "method"), ("dies", "crashes", "is killed", "fails"), ("model", "LLM"),
]  # fmt: skip
WORD_OF_SYNONYMS = re.compile(
    rf"\b({'|'.join(sorted({word for group in SYNONYMS for word in group}, key=len, reverse=True))})\b"
)
UNSTRESSED = frozenset("How What I a an the of to do does in is are it can my for by".split())  # noqa: SIM905
# Openings, places and punctuation that `as_typed` adds to a question.
ADDED = re.compile(
    rf"^({'|'.join(OPENINGS)}) |( ({'|'.join(itertools.chain(*PLACES.values()))}))?[ ?.!]*$", re.IGNORECASE
)


@dataclass(frozen=True)
class Phrasing:
    """Question about a fact; `kind` is subject, goal or paraphrase."""

    fact: Fact
    text: str
    kind: str
    is_held_out: bool


@dataclass(frozen=True)
class QuestionSplit:
    """Training questions of each fact, by kind, and the held-out questions of all facts."""

    training: dict[Fact, dict[str, list[str]]]
    held_out: list[Phrasing]

    @cached_property
    def held_out_forms(self) -> frozenset[str]:
        return frozenset(normal_form(phrasing.text) for phrasing in self.held_out)

    def is_held_out(self, fact: Fact, question: str) -> bool:
        """Whether a changed question has become a held-out one, or contains the fact's wording that is held out."""
        unseen = unseen_wording(fact)
        return normal_form(question) in self.held_out_forms or (unseen is not None and contains(question, unseen))


def split_questions(facts: Iterable[Fact]) -> QuestionSplit:
    """Divide the questions about facts. A training question that equals a held-out one but for its form is dropped."""
    phrasings = {fact: phrasings_of(fact) for fact in facts}
    held_out = [phrasing for of_fact in phrasings.values() for phrasing in of_fact if phrasing.is_held_out]
    split = QuestionSplit({}, held_out)
    for fact, of_fact in phrasings.items():
        by_kind = split.training.setdefault(fact, {})
        for phrasing in of_fact:
            if normal_form(phrasing.text) not in split.held_out_forms:
                by_kind.setdefault(phrasing.kind, []).append(phrasing.text)
    return split


def phrasings_of(fact: Fact) -> list[Phrasing]:
    """Return every question about a fact. A held-out wording is held out with all templates, but asked only once."""
    unseen = unseen_wording(fact)
    found = []

    def add(text: str, kind: str, is_held_out: bool) -> None:
        found.append(Phrasing(fact, text[0].upper() + text[1:] if " " in text else text, kind, is_held_out))

    for template in TEMPLATES[fact.kind]:
        add(template.format(s=fact.subject), "subject", is_drawn(fact.subject, template))
    for goal in fact.goals:
        if goal == unseen:
            add(GOALS[hash_of(goal) % len(GOALS)].format(g=goal), "paraphrase", True)
            continue
        for template in GOALS:
            add(template.format(g=goal), "goal", is_drawn(goal, template))
    for question in fact.questions:
        add(question, "paraphrase", question == unseen)
    return found


@cache
def unseen_wording(fact: Fact) -> str | None:
    """Return the goal or question of a fact that is held out with all templates, if the fact has enough others."""
    own = [*fact.goals, *fact.questions]
    candidates = [phrase for phrase in own if not any(contains(other, phrase) for other in own if other != phrase)]
    return min(candidates, key=hash_of) if len(own) >= MIN_PHRASES_TO_HOLD_ONE_OUT else None


def contains(question: str, wording: str) -> bool:
    """Whether a question contains the words of a wording one after the other."""
    return f" {normal_form(wording)} " in f" {normal_form(question)} "


def hash_of(*texts: str) -> int:
    return int(hashlib.sha256("\n".join(texts).encode()).hexdigest(), 16)


def is_drawn(*texts: str) -> bool:
    """Whether a pair of a text and a template is held out, which its hash decides."""
    return hash_of(*texts) % 100 < HELD_OUT_PERCENT


@lru_cache(maxsize=100_000)
def normal_form(question: str) -> str:
    """Return a question without the differences that `as_typed` makes, except typing errors."""
    return ADDED.sub("", " ".join(question.replace("`", "").split())).lower()


def as_typed(question: str, topic: str, rng: random.Random) -> str:
    """Change a question's form as people do: case, punctuation, an opening, the place, and seldom a typing error."""
    text, mark = (question[:-1], question[-1]) if question[-1] in "?." and " " in question else (question, "")
    if mark and rng.random() < 0.1 and topic in PLACES and not re.search("python|eagleray", text, re.IGNORECASE):
        text = f"{text} {rng.choice(PLACES[topic])}"
    if rng.random() < 0.06:
        text = f"{rng.choice(OPENINGS)} {text if rng.random() < 0.5 else text[0].lower() + text[1:]}"
    if rng.random() < 0.15:
        text = text.lower() if rng.random() < 0.5 else text[0].lower() + text[1:]
    if rng.random() < 0.04:
        text = with_typing_error(text, rng)
    return text if rng.random() < 0.25 else text + mark


def reworded(question: str, rng: random.Random) -> str:
    """Replace some words of a question by synonyms; seldom leave only the stressed words, as in a search engine."""
    if rng.random() < 0.07:
        stressed = [word for word in question.rstrip("?.").split() if word not in UNSTRESSED]
        return " ".join(stressed) if len(stressed) > 1 else question

    def synonym(match: re.Match[str]) -> str:
        if rng.random() < 0.7:
            return match[0]
        return rng.choice([word for group in SYNONYMS if match[0] in group for word in group])

    return WORD_OF_SYNONYMS.sub(synonym, question)


def with_typing_error(text: str, rng: random.Random) -> str:
    """Drop, double or swap a letter within one of the longer words, if there is one."""
    words = list(re.finditer(r"[a-z]{5,}", text))
    if not words:
        return text
    word = rng.choice(words)
    at = rng.randrange(word.start() + 1, word.end() - 1)
    return rng.choice([
        text[:at] + text[at + 1 :],
        text[:at] + text[at] + text[at:],
        text[:at] + text[at + 1] + text[at] + text[at + 2 :],
    ])  # fmt: skip
