"""Parts of the training of the embedded model: corpus, batches, schedule, a run that continues, and its evaluation."""

from __future__ import annotations

import ast
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from demo_model import checkpoint, evaluation, training
from demo_model.accuracy import exact_share
from demo_model.checkpoint import CONFIG, END_ID, IM_END, IM_END_ID, render_question, train_tokenizer
from demo_model.corpus import Corpus, comments, documented_names, reference_page, session
from demo_model.dialogues import DialogueSampler
from demo_model.evaluation import ALL_HELD_OUT, Probe, Share, evaluate, repeats_a_line, shares
from demo_model.experts import permuted_experts_forward
from demo_model.facts import load_facts
from demo_model.feed import IGNORED, ChatFeed, TextFeed, pack
from demo_model.phrasings import split_questions
from demo_model.training import PEAK_LR, Budget, TrainingRun, learning_rate

from eagleray import SamplingParams

TEXTS = [
    "def add(a, b):\n    # Return the sum of both.\n    return a + b\n",
    "The sum of two numbers is a number. " * 40,
    "A list has items. " * 200,
]
SMALL_CONFIG = {
    "vocab_size": 400,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


@pytest.fixture(scope="module")
def tokenizer():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIG, "vocab_size", 400)
        return train_tokenizer([*TEXTS, *(fact.answer for fact in load_facts())])


@pytest.fixture(scope="module")
def sampler():
    return DialogueSampler(split_questions(load_facts()[:20]), ["shelve.open", "wave.open"], TEXTS)


def test_documented_names_of_a_source_have_signatures_without_self():
    source = 'class Box:\n    """A box."""\n    def put(self, item, /):\n        """Put an item in."""\n'
    page = reference_page(list(documented_names(ast.parse(source), "boxes")))
    assert page == "boxes.Box\n\nA box.\n\nboxes.Box.put(item, /)\n\nPut an item in."


def test_comments_keeps_blocks_of_prose_alone():
    prose = (
        "# The pool is searched from the end, because the last connection is the one\n# that was used most recently.\n"
    )
    assert comments(f"x = 1  # one\n\n{prose}y = 2\n####\n").startswith("The pool is searched")
    assert comments("x = 1  # one\n\n# if x: return foo(bar)[0](1, 2) + {3: 4}[3] - baz(5, 6, 7, 8)\n") == ""


def test_session_shows_the_values_of_its_expressions():
    lines = session(random.Random(3)).split("\n")
    typed, shown = lines[::2], lines[1::2]
    assert len(typed) >= 4
    assert [repr(eval(line.removeprefix(">>> "))) for line in typed] == shown


def test_pack_drops_short_rests_so_that_rows_begin_with_documents():
    rows = pack([torch.arange(1, 12), torch.arange(100, 120)], row_len=8)
    assert rows.shape == (3, 9)
    assert rows[0].tolist() == list(range(1, 10)) and rows[1, :2].tolist() == [10, 11]


def test_text_feed_continues_at_a_position_with_the_same_rows():
    documents = [torch.full((40,), number) for number in range(30)]
    feed = TextFeed(documents)
    for _ in range(5):
        feed.next_rows(64, 16)
    position = dict(feed.position)
    expected = feed.next_rows(64, 16)
    other = TextFeed(documents)
    other.seek(**position)
    assert all(torch.equal(a, b) for a, b in zip(expected, other.next_rows(64, 16), strict=True))


def test_chat_feed_targets_are_the_answers_with_their_ends(tokenizer, sampler):
    feed = ChatFeed(tokenizer, sampler)
    inputs, targets = feed.rows_of_step(7, num_tokens=2048, row_len=1024)
    assert inputs.shape == targets.shape == (2, 1024)
    answers = tokenizer.decode(targets[targets != IGNORED].tolist(), skip_special_tokens=False).split(IM_END)[:-1]
    known = {fact.answer for fact in sampler.training}
    assert len(answers) > 5 and sum(answer in known for answer in answers) > len(answers) / 2
    assert torch.equal(inputs, feed.rows_of_step(7, 2048, 1024)[0])
    assert not torch.equal(inputs, feed.rows_of_step(8, 2048, 1024)[0])


def test_learning_rate_rises_stays_and_falls_to_zero():
    assert learning_rate(0, 0.0) < learning_rate(20, 0.01) < learning_rate(500, 0.3) == PEAK_LR
    assert learning_rate(5000, 0.7) == pytest.approx(PEAK_LR / 2) and learning_rate(9999, 1.0) == 0.0


def test_budget_of_steps_precedes_that_of_minutes():
    assert Budget(minutes=10).progress(step=5, seconds=300) == pytest.approx(0.5)
    assert Budget(minutes=10, num_steps=50).progress(step=5, seconds=300) == pytest.approx(0.1)


def test_permuted_experts_forward_agrees_with_a_loop_over_tokens():
    torch.manual_seed(0)
    experts = torch.nn.Module()
    experts.num_experts = 4
    experts.gate_up_proj = torch.nn.Parameter(torch.randn(4, 32, 16) * 0.2)
    experts.down_proj = torch.nn.Parameter(torch.randn(4, 16, 16) * 0.2)
    tokens = torch.randn(10, 16, requires_grad=True)
    weights, index = torch.randn(10, 4).softmax(-1).topk(2)
    permuted_experts_forward(experts, tokens, index, weights).square().sum().backward()
    found = [tokens.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    tokens.grad = experts.gate_up_proj.grad = experts.down_proj.grad = None
    rows = []
    for token, chosen, weight in zip(tokens, index, weights, strict=True):
        outputs = []
        for expert in chosen:
            gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
            outputs.append(experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
        rows.append(weight @ torch.stack(outputs))
    torch.stack(rows).square().sum().backward()
    expected = [tokens.grad, experts.gate_up_proj.grad, experts.down_proj.grad]
    for a, b in zip(found, expected, strict=True):
        assert (a - b).norm() < 0.03 * b.norm()


def test_exact_share_counts_answers_that_greedy_decoding_gives(tokenizer):
    answers = {"What is a list?": "A list has items.", "What is a sum?": "A number."}
    spoken = dict.fromkeys(answers, "A list has items.")

    def logits_of(ids):
        """Continue each prompt with the spoken answer, whatever follows it."""
        logits = torch.zeros(*ids.shape, 400)
        for row, question in enumerate(order):
            start = len(tokenizer.encode(render_question(question)).ids)
            for place, token in enumerate(tokenizer.encode(spoken[question] + IM_END).ids, start - 1):
                if place < ids.shape[1]:
                    logits[row, place, token] = 1
        return logits

    lengths = {q: len(tokenizer.encode(render_question(q) + a + IM_END).ids) for q, a in answers.items()}
    order = sorted(answers, key=lengths.__getitem__)
    assert exact_share(list(answers.items()), tokenizer, logits_of) == 0.5


def test_shares_count_right_and_exact_answers_by_kind():
    probes = [Probe(kind, (("user", "?"),), "It is a List.", ("list",)) for kind in ("goal", "subject", "sum")]
    given = [("it is  a list.", 5), ("A LIST, I think", 5), ("no", 2)]
    found = shares(probes, given)
    assert found["goal"] == Share(1, 1, 1) and found["subject"] == Share(1, 1, 0) and found["sum"] == Share(1, 0, 0)
    assert found[ALL_HELD_OUT] == Share(2, 2, 1)


class OneAnswerLLM:
    """Model that gives the same short answer to every conversation."""

    def __init__(self, checkpoint):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def get_default_sampling_params(self, **changes):
        return SamplingParams(**changes)

    def chat(self, messages, sampling_params, *, use_tqdm):
        completion = SimpleNamespace(text="I do not know that.", token_ids=[1, 2])
        return [SimpleNamespace(outputs=[completion]) for _, _ in zip(messages, sampling_params, strict=True)]


@pytest.mark.parametrize("limit", [1, 20])
def test_evaluate_with_a_limit_asks_that_many_of_each_kind(limit, monkeypatch):
    names = [f"module_{number}.function" for number in range(1000)]
    lines = "\n".join(f"This is a line of text with the number {number}." for number in range(20))
    monkeypatch.setattr(evaluation, "build_corpus", lambda: (Corpus(names=names, prose=[lines]), Corpus(prose=[lines])))
    monkeypatch.setattr(evaluation, "LLM", OneAnswerLLM)
    monkeypatch.setattr(evaluation, "NUM_OTHERS", 20)
    found = evaluate(Path("unused"), limit, num_facts=100)
    counts = {kind: share.count for kind, share in found.greedy.items()}
    assert counts.pop(ALL_HELD_OUT) == 3 * limit and set(counts.values()) == {limit}
    assert found.greedy["unknown topic"].right == limit and found.greedy["goal"].right == 0
    assert found.loops == [] and not found.is_good


def test_repeats_a_line_from_the_fourth_time():
    assert not repeats_a_line("a\nb\na\n\na\n\n\n\n") and repeats_a_line("a\na \nb\na\n a")


@pytest.fixture
def make_run(tmp_path, tokenizer, monkeypatch):
    """Start or continue a run of a tiny model on a tiny corpus, by its name."""
    for name, value in SMALL_CONFIG.items():
        monkeypatch.setitem(checkpoint.CONFIG, name, value)
    corpus = Corpus(code=TEXTS[:1] * 50, prose=TEXTS[1:], names=["shelve.open", "wave.open"])
    monkeypatch.setattr(training, "build_corpus", lambda: (corpus, corpus))
    monkeypatch.setattr(training, "TOKENS_OF_A_KIND", 256)
    monkeypatch.setattr(training, "LONG_CHAT_ROW_LEN", 256)
    monkeypatch.setattr(training, "LONG_TEXT_ROW_LEN", 256)
    monkeypatch.setattr(training, "TEXT_ROW_LEN", 128)

    def make(name: str) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))
        return TrainingRun(tmp_path / name, Budget(1, num_steps=4), num_facts=5)

    return make


def test_run_that_is_stopped_and_continued_gives_the_same_model(make_run):
    whole, first = make_run("whole"), make_run("parts")
    for _ in range(4):
        whole.train_step()
    for _ in range(2):
        first.train_step()
    first.save()
    second = make_run("parts")
    assert second.step == 2
    for _ in range(2):
        second.train_step()
    assert (second.step, second.tokens) == (whole.step, whole.tokens) == (4, 4 * 512)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_train_step_with_an_overflow_changes_no_weight(make_run, monkeypatch):
    run = make_run("overflow")
    before = [parameter.clone() for parameter in run.model.parameters()]
    forward = run.forward
    monkeypatch.setattr(run, "forward", lambda *batch: (forward(*batch)[0] * float("inf"), forward(*batch)[1]))
    run.train_step()
    assert run.step == 1
    for a, b in zip(before, run.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_end_tokens_are_those_of_the_vocabulary(tokenizer):
    assert tokenizer.token_to_id("<|endoftext|>") == END_ID and tokenizer.token_to_id(IM_END) == IM_END_ID
