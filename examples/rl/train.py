"""Reinforcement learning on the demo model: rollouts of eagleray, gradient steps of transformers and torch.

    python examples/rl/train.py

The trainer rewards tokens that have an "s" in them, and pushes its weights to the engine after every step by way of
shared memory. In the middle of one push it kills the engine. At the end it checks that the reward has risen, that every
token was made by the newest weights, and that the log-probabilities of engine and trainer agree. Needs transformers.
"""

from __future__ import annotations

import argparse
import time

import torch
from instance import Instance, Rollout, demo_model
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = ("Return the ", "Raises ", "The first ", "class ", "def ", "If ", "A list of ", "This method ")
NUM_EACH = 8
MAX_TOKENS = 24
LEARNING_RATE = 5e-4
MAX_LOGPROB_DIFFERENCE = 1e-3
"""Engine and trainer compute in float32, in different orders."""
MIN_GAIN = 0.1
"""Rise of the reward, the share of tokens with an "s", from the first steps to the last ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--kill-at", type=int, default=5, help="step whose update loses its engine; 0: none")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(demo_model(), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
    is_wanted = torch.tensor(["s" in tokenizer.decode([token]) for token in range(model.config.vocab_size)])
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)

    options = ["--dtype", "float32", "--tensor-parallel-size", str(arguments.tensor_parallel_size)]
    rewards, differences = [], []
    with Instance(options) as instance:
        version = "default"
        for step in range(1, arguments.steps + 1):
            start = time.perf_counter()
            groups = instance.rollouts(prompts, num_each=NUM_EACH, max_tokens=MAX_TOKENS, seed=1000 * step)
            generated = time.perf_counter()
            assert {name for group in groups for rollout in group for name in rollout.versions} == {version}
            reward, difference = train(model, optimizer, groups, is_wanted)
            trained = time.perf_counter()
            version = f"step-{step}"
            attempts = instance.push(model.state_dict().items(), version, kill_engine=step == arguments.kill_at)
            rewards.append(reward)
            differences.append(difference)
            print(
                f"step {step:2}: reward {reward:.3f}, log-probabilities differ by at most {difference:.1e}; rollouts "
                f"{generated - start:.2f} s, training {trained - generated:.2f} s, update "
                f"{time.perf_counter() - trained:.2f} s in {attempts} attempt(s)"
            )

    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    print(f"reward of the first and the last 3 steps: {first:.3f}, {last:.3f}")
    assert last - first >= MIN_GAIN, f"the reward has not risen by {MIN_GAIN}"
    assert max(differences) <= MAX_LOGPROB_DIFFERENCE, "engine and trainer disagree"


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, groups: list[list[Rollout]], is_wanted: Tensor
) -> tuple[float, float]:
    """Take one step of policy gradients, with each group's mean reward as its baseline.

    Returns the mean reward and the largest difference between the log-probabilities of engine and trainer.
    """
    optimizer.zero_grad()
    num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group)
    rewards, difference = [], 0.0
    for group in groups:
        tokens = torch.tensor([rollout.prompt + rollout.token_ids for rollout in group])
        outputs = torch.tensor([rollout.token_ids for rollout in group])
        num_prompt = len(group[0].prompt)
        logits = model(tokens[:, :-1]).logits[:, num_prompt - 1 :]
        logprobs = logits.log_softmax(-1).gather(-1, outputs[..., None])[..., 0]  # [group, tokens]
        of_engine = torch.tensor([rollout.logprobs for rollout in group])
        difference = max(difference, (logprobs.detach() - of_engine).abs().max().item())
        reward = is_wanted[outputs].float().mean(-1)
        advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
        (-(advantage[:, None] * logprobs).sum() / num_tokens).backward()
        rewards.append(reward.mean().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return sum(rewards) / len(rewards), difference


if __name__ == "__main__":
    main()
