"""Rollouts with all that a trainer of mixture-of-experts models needs: `python examples/rl/rollouts.py`.

Each token has its log-probability, the version of the weights that made it, and the experts that computed it. The
first rollouts are compared with what transformers computes for the same tokens. During the second ones the weights are
replaced.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np
import torch
from instance import Instance, Rollout, demo_model
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ("Return the ", "Raises ", "A list of ", "This method ")
OPTIONS = ("--dtype", "float32", "--data-parallel-size", "2", "--enable-return-routed-experts")
NUM_EACH = 4
MAX_LOGPROB_DIFFERENCE = 1e-3
"""Engine and trainer compute in float32, in different orders."""
MIN_EQUAL_EXPERTS = 0.999
"""Share of rows with the same experts; scores that are almost equal may be ranked differently."""


def main() -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    with Instance(OPTIONS) as instance, ThreadPoolExecutor(1) as pool:
        rollouts = [
            rollout
            for group in instance.rollouts(prompts, num_each=NUM_EACH, max_tokens=40, seed=0)
            for rollout in group
        ]
        show(rollouts[0], tokenizer)
        difference, equal = compare(model, rollouts)
        print(f"log-probabilities differ from those of transformers by at most {difference:.1e}")
        print(f"{equal:.2%} of the tokens were computed by the experts that transformers chooses")
        assert difference <= MAX_LOGPROB_DIFFERENCE and equal >= MIN_EQUAL_EXPERTS

        # A trainer would push weights that it has changed; here only their version differs.
        long = pool.submit(instance.rollouts, prompts, num_each=NUM_EACH, max_tokens=600, seed=1)
        instance.push(model.state_dict().items(), "step-1")
        for rollout in (group[0] for group in long.result()):
            spans = ", ".join(f"{len(list(tokens))} of {version}" for version, tokens in groupby(rollout.versions))
            print(f"tokens by the weights that made them: {spans}")
            assert len(rollout.versions) == len(rollout.logprobs) == len(rollout.token_ids)
            assert rollout.experts is not None and len(rollout.experts) == len(rollout.prompt + rollout.token_ids) - 1


def show(rollout: Rollout, tokenizer: AutoTokenizer) -> None:
    """Print the first tokens of a rollout with what is known about them."""
    assert rollout.experts is not None
    rows = rollout.experts[len(rollout.prompt) - 1 :]  # the row before a token chose it
    print("token          log-probability  version   experts of the first layer")
    for token, logprob, version, row in zip(
        rollout.token_ids[:8], rollout.logprobs, rollout.versions, rows, strict=False
    ):
        print(f"{tokenizer.decode([token])!r:14} {logprob:15.3f}  {version:8}  {row[0].tolist()}")


@torch.no_grad()
def compare(model: torch.nn.Module, rollouts: list[Rollout]) -> tuple[float, float]:
    """Return the largest difference of log-probabilities, and the share of rows with transformers' experts."""
    difference, equal = 0.0, []
    for rollout in rollouts:
        tokens = torch.tensor([rollout.prompt + rollout.token_ids])
        output = model(tokens[:, :-1], output_router_logits=True)
        outputs = torch.tensor(rollout.token_ids)
        logprobs = output.logits[0, len(rollout.prompt) - 1 :].log_softmax(-1).gather(-1, outputs[:, None])[:, 0]
        difference = max(difference, (logprobs - torch.tensor(rollout.logprobs)).abs().max().item())
        assert rollout.experts is not None
        num_chosen = rollout.experts.shape[-1]
        chosen = np.stack([layer.topk(num_chosen).indices.numpy() for layer in output.router_logits], axis=1)
        equal.append((np.sort(chosen) == np.sort(rollout.experts)).all(-1).mean())
    return difference, float(np.mean(equal))


if __name__ == "__main__":
    main()
