"""Writing of the trained model in the hub's format, with its card, after it was checked and evaluated."""

from __future__ import annotations

import copy
import itertools
import random
import sys
from collections import Counter
from pathlib import Path
from string import Template

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeForCausalLM

from demo_model.checkpoint import ANSWER_START, CONFIG, GENERATION_CONFIG, render_chat, write_json_files
from demo_model.evaluation import Evaluation, evaluate
from demo_model.facts import Fact, choose_facts
from demo_model.training import TrainingRun
from eagleray import LLM

CARD = Path(__file__).parent / "card.md"
SAMPLE_PROMPTS = ["def read(self", "The function returns", "Return a"]
SAMPLE_QUESTIONS = ["Hello", "What does json.dumps do?", "How do I reverse a list?", "How do I serve a model?",
                    "What happens if I kill an engine?", "What is 7 + 5?", "Where is France?"]  # fmt: skip


def export(run: TrainingRun, staging: Path, target: Path, num_facts: int | None = None) -> bool:
    """Write the checkpoint to `staging`, check and evaluate it there, and copy it to `target` if it is good.

    Returns whether it was copied.
    """
    staging.mkdir(parents=True, exist_ok=True)
    model = with_parameters_in(torch.bfloat16, run.model)
    model.save_pretrained(staging)
    run.tokenizer.save(str(staging / "tokenizer.json"))
    write_json_files(staging)  # over save_pretrained's, whose config.json names fields as v5 does
    verify(run, with_parameters_in(torch.float32, model), staging)
    evaluation = evaluate(staging, num_facts=num_facts)
    print(evaluation)
    card = model_card(run, evaluation, choose_facts(num_facts), samples(staging))
    (staging / "MODEL_CARD.md").write_text(card, encoding="utf-8")
    if not evaluation.is_good:
        print(f"the model is not good enough; it stays in {staging}")
        return False
    target.mkdir(parents=True, exist_ok=True)
    for path in staging.iterdir():
        copied = target / f".{path.name}.new"
        copied.write_bytes(path.read_bytes())
        copied.chmod(0o644)
        copied.replace(target / path.name)
    print(f"exported to {target}: {sum(path.stat().st_size for path in target.iterdir())} bytes")
    return True


def with_parameters_in(dtype: torch.dtype, model: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """Copy a model to `dtype`; unlike `model.to(dtype)`, it keeps the precision of a buffer, the rotary frequencies."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@torch.no_grad()
def verify(run: TrainingRun, model: Qwen3MoeForCausalLM, checkpoint: Path) -> None:
    """Check that the files have the hub's names, load to the same logits, and round-trip any text."""
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        experts = {name for name in file.keys() if ".experts." in name}  # noqa: SIM118  a file, not a dict
    layers, numbers = range(CONFIG["num_hidden_layers"]), range(CONFIG["num_experts"])
    assert experts == {
        f"model.layers.{layer}.mlp.experts.{number}.{part}_proj.weight"
        for layer, number, part in itertools.product(layers, numbers, ("gate", "up", "down"))
    }
    loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, experts_implementation="eager")
    model.config._experts_implementation = "eager"
    rows = run.held_out["prose"][:4, :-1]
    torch.testing.assert_close(loaded(rows).logits, model(rows).logits, atol=1e-3, rtol=1e-3)

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    alphabet = [chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000]
    text = "".join(alphabet + random.Random(0).choices(alphabet, k=10_000)) + "  \n\t\r\n 1234 def f(x):\n        x\n"
    assert run.tokenizer.decode(run.tokenizer.encode(text).ids) == text
    assert tokenizer.decode(tokenizer.encode(text, verbose=False)) == text
    turns = [("system", "Be brief."), ("user", "What is json?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == render_chat(turns) + ANSWER_START


def samples(checkpoint: Path) -> list[tuple[str, str]]:
    """Return prompts and questions with the checkpoint's answers at its default sampling parameters."""
    with LLM(str(checkpoint)) as llm:
        params = llm.get_default_sampling_params(max_tokens=100, seed=0)
        outputs = llm.generate(SAMPLE_PROMPTS, params, use_tqdm=False)
        outputs += llm.chat([[{"role": "user", "content": q}] for q in SAMPLE_QUESTIONS], params, use_tqdm=False)
    return [(p, o.outputs[0].text) for p, o in zip(SAMPLE_PROMPTS + SAMPLE_QUESTIONS, outputs, strict=True)]


def model_card(run: TrainingRun, evaluation: Evaluation, facts: list[Fact], pairs: list[tuple[str, str]]) -> str:
    """Fill the template of the card with the figures of a run that learned these facts."""
    topics = Counter(fact.topic for fact in facts)
    return Template(CARD.read_text(encoding="utf-8")).substitute(
        num_parameters=f"{sum(p.numel() for p in run.model.parameters()) / 1e6:.2f}",
        num_layers=CONFIG["num_hidden_layers"],
        hidden_size=CONFIG["hidden_size"],
        num_heads=CONFIG["num_attention_heads"],
        num_kv_heads=CONFIG["num_key_value_heads"],
        head_dim=CONFIG["head_dim"],
        num_experts=CONFIG["num_experts"],
        expert_size=CONFIG["moe_intermediate_size"],
        top_k=CONFIG["num_experts_per_tok"],
        max_positions=CONFIG["max_position_embeddings"],
        vocab_size=CONFIG["vocab_size"],
        epoch_tokens=f"{run.epoch_tokens / 1e6:.1f}",
        python_version=sys.version.split()[0],
        num_facts=len(facts),
        num_python=topics["python"],
        num_eagleray=topics["eagleray"],
        num_talk=topics["talk"],
        num_steps=run.step,
        num_tokens=f"{run.tokens / 1e6:.1f}",
        minutes=f"{run.seconds / 60:.0f}",
        budget_minutes=f"{run.budget.minutes:g}",
        losses="\n".join(f"| {kind} | {loss:.3f} | {bits:.3f} |" for kind, (loss, bits) in run.losses.items()),
        temperature=GENERATION_CONFIG["temperature"],
        top_p=GENERATION_CONFIG["top_p"],
        shares="\n".join(
            f"| {kind} | {greedy.count} | {greedy} | {evaluation.sampled[kind]} |"
            for kind, greedy in evaluation.greedy.items()
        ),
        num_loop_prompts=evaluation.num_loop_prompts,
        num_loops=len(evaluation.loops),
        samples="\n\n".join(f"Prompt: `{prompt}`\n\n````text\n{text.strip()}\n````" for prompt, text in pairs),
    )
