"""lm-eval: its models for such servers, with tasks whose right answers are the server's own greedy ones."""

from __future__ import annotations

import functools
import json
import math
import os
import urllib.request
from pathlib import Path
from typing import Any

os.environ["HF_HOME"] = str(Path("huggingface").absolute())  # read when datasets is imported

import lm_eval
from checking import MODEL, MODEL_DIRECTORY, URL, check, expect, run_checks
from lm_eval.tasks import TaskManager

PROMPTS = ("def main():", "import json", "class Server:", "for name in names:", "The function returns")
MAX_TOKENS = 6
TASKS = TaskManager(include_defaults=False)
"""Index of tasks, without lm-eval's own: reading their thousands of files would delay the start."""
WITH_TOKENIZER = f"tokenizer_backend=huggingface,tokenizer={MODEL_DIRECTORY}"


def post(path: str, **body: Any) -> dict[str, Any]:
    """Return the answer to a request."""
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def completed(prompt: str) -> str:
    """Return the server's own greedy completion."""
    answer = post("/v1/completions", model=MODEL, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0)
    return answer["choices"][0]["text"]


def answered(prompt: str) -> str:
    """Return the server's own greedy answer in a chat."""
    messages = [{"role": "user", "content": prompt}]
    answer = post("/v1/chat/completions", model=MODEL, messages=messages, max_tokens=MAX_TOKENS, temperature=0)
    return answer["choices"][0]["message"]["content"]


def evaluate(
    rows: list[dict[str, str]], arguments: str = WITH_TOKENIZER, *, model: str = "local-completions", **task: Any
) -> dict[str, Any]:
    """Return the metrics of a task over these rows. `arguments`: further arguments of the model."""
    route = "/v1/chat/completions" if model == "local-chat-completions" else "/v1/completions"
    data = Path("rows.json").absolute()
    data.write_text(json.dumps(rows))
    prompt_and_target = {"doc_to_text": "{{prompt}}", "doc_to_target": "{{target}}", "target_delimiter": ""}
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=f"model={MODEL},base_url={URL}{route},max_retries=1,{arguments}",
        tasks=[
            {
                "task": "local",
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": {"test": str(data)}},
                "test_split": "test",
                **prompt_and_target,
                **task,
            }
        ],
        task_manager=TASKS,
        apply_chat_template=model == "local-chat-completions",
        bootstrap_iters=0,
    )
    return {name.removesuffix(",none"): value for name, value in results["results"]["local"].items()}


@functools.cache
def loglikelihood(arguments: str) -> float:
    """Return the perplexity of the server's own completions. Raises `AssertionError` if one is not the greedy one."""
    rows = [{"prompt": prompt, "target": completed(prompt)} for prompt in PROMPTS]
    metrics = [{"metric": "acc"}, {"metric": "perplexity"}]
    results = evaluate(rows, arguments, output_type="loglikelihood", metric_list=metrics)
    expect(results["acc"] == 1.0, "share of completions that are the greedy ones:", results["acc"])
    return results["perplexity"]


def check_generations(rows: list[dict[str, str]], arguments: str = WITH_TOKENIZER, **options: Any) -> None:
    """Raise `AssertionError` if a generated text is not the row's target."""
    limits = {"max_gen_toks": MAX_TOKENS, "until": ["never"]}
    metrics = [{"metric": "exact_match"}]
    results = evaluate(
        rows, arguments, output_type="generate_until", metric_list=metrics, generation_kwargs=limits, **options
    )
    expect(results["exact_match"] == 1.0, "share of texts that are the server's own:", results["exact_match"])


@check("loglikelihood of token ids and of texts")
def loglikelihood_of_ids_and_texts():
    of_ids, of_texts = loglikelihood(WITH_TOKENIZER), loglikelihood(f"{WITH_TOKENIZER},tokenized_requests=False")
    expect(math.isclose(of_ids, of_texts, rel_tol=1e-6), "perplexities differ:", of_ids, of_texts)


@check("loglikelihood in batches, and of several requests at a time")
def loglikelihood_at_a_time():
    alone = loglikelihood(WITH_TOKENIZER)
    for arguments in ("batch_size=4", "num_concurrent=4"):
        together = loglikelihood(f"{WITH_TOKENIZER},{arguments}")
        expect(math.isclose(alone, together, rel_tol=1e-6), "perplexities differ:", arguments, alone, together)


@check("loglikelihood with the server's tokenizer")
def remote_tokenizer():
    remote, local = loglikelihood("tokenizer_backend=remote"), loglikelihood(WITH_TOKENIZER)
    expect(math.isclose(remote, local, rel_tol=1e-6), "perplexities differ:", remote, local)


@check("loglikelihood_rolling")
def rolling():
    rows = [{"prompt": "", "target": prompt} for prompt in PROMPTS]
    bits = evaluate(
        rows, output_type="loglikelihood_rolling", doc_to_text="", metric_list=[{"metric": "bits_per_byte"}]
    )
    whole = evaluate(rows, output_type="loglikelihood", metric_list=[{"metric": "perplexity"}])
    num_bytes = sum(len(prompt.encode()) for prompt in PROMPTS)
    expected = math.log2(whole["perplexity"]) * len(PROMPTS) / num_bytes
    expect(math.isclose(bits["bits_per_byte"], expected, rel_tol=1e-6), "bits per byte:", bits, expected)


@check("multiple_choice")
def multiple_choice():
    targets = [completed(prompt) for prompt in PROMPTS]
    rows = [{"prompt": prompt, "target": target} for prompt, target in zip(PROMPTS, targets, strict=True)]
    results = evaluate(
        rows,
        output_type="multiple_choice",
        doc_to_choice="{{[target, '###']}}",
        doc_to_target=0,
        metric_list=[{"metric": "acc"}],
    )
    expect(results["acc"] == 1.0, "share of rows in which the greedy text is the likelier:", results["acc"])


@check("generate_until")
def generate_until():
    check_generations([{"prompt": prompt, "target": completed(prompt)} for prompt in PROMPTS])


@check("generate_until of local-chat-completions")
def generate_until_chat():
    rows = [{"prompt": prompt, "target": answered(prompt)} for prompt in PROMPTS]
    check_generations(rows, "num_concurrent=2", model="local-chat-completions")


if __name__ == "__main__":
    run_checks()
