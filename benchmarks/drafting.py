"""Speedup by drafts for given step times: the scheduler and its drafter run without a model or a clock.

python benchmarks/drafting.py [--times moe-1b dense-0.6b] [--workload copy text …] [--rounds 3] [--tokens 128]
                              [--noise 0.15]

The requests are the same as in `speculation.py`. The time of a step is looked up in a table of times that were measured
on two cores for its number of tokens; the drafter sees it with noise, as on a shared machine. So the figures are the
same in every run, and show whether drafting pays. They leave out the scheduler's own time and the rounds in which
drafts are checked.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

from speculation import METHODS, WORKLOADS, Group, Texts

from eagleray.config.speculation import speculation
from eagleray.identity import ClientId
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import StepPlan, StepResult
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.speculation import Drafter

CLIENT = ClientId("benchmark", 0)
BUDGET = 65_536
"""Tokens of a step: all prompts of a group are one step, which does not count."""

TIMES: dict[str, Callable[[int], float]] = {
    "moe-1b": lambda count: 8.0 + 1.1 * count if count < 5 else 12.0 + 1.1 * count,
    "dense-0.6b": lambda count: max(40.0, 40.0 + 3.0 * (count - 9)),
    "dense-tiny": lambda count: 0.45 + 0.075 * count,
}
"""Milliseconds of a step by its number of tokens."""

DELAYED = 0.03
"""Part of the steps that something else delays, by up to three times their time."""


class Simulated(NamedTuple):
    """Milliseconds of groups of requests, and of each request on average."""

    groups: float
    request: float


class Simulation:
    """A scheduler, with a drafter or without one."""

    def __init__(self, drafter: Drafter | None, times: Callable[[int], float], noise: float) -> None:
        self._times = times
        self._noise = noise
        self._random = random.Random(0)
        self._outputs: dict[str, list[int]] = {}
        self._rows: dict[int, list[int]] = {}
        """Tokens that each row is still to sample, the next one last."""
        self.scheduler = Scheduler(
            max_num_seqs=64,
            max_num_batched_tokens=BUDGET,
            max_model_len=4096,
            block_size=16,
            num_blocks=8192,
            enable_prefix_caching=True,
            policy="fcfs",
            drafter=drafter,
        )

    def run(self, groups: list[Group]) -> Simulated:
        """Run groups one after another."""
        total = 0.0
        of_requests: list[float] = []
        for group in groups:
            for case in group:
                self._add(case.prompt, case.output)
            elapsed = 0.0
            while self.scheduler.has_work:
                milliseconds, num_finished = self._step()
                elapsed += milliseconds
                of_requests += [elapsed] * num_finished
            total += elapsed
        return Simulated(total, statistics.mean(of_requests))

    def _add(self, prompt: list[int], output: list[int]) -> None:
        name = str(len(self._outputs))
        self._outputs[name] = output
        self.scheduler.add(
            Generate(
                request_id=name,
                client=CLIENT,
                prompt_token_ids=prompt,
                sampling=Sampling(seed=0, temperature=0.0),
                stopping=Stopping(max_tokens=len(output)),
            )
        )

    def _step(self) -> tuple[float, int]:
        """Return the milliseconds of the next step, 0 for one with prompts, and the number of requests that finish."""
        plan = self.scheduler.plan()
        assert plan is not None
        milliseconds = self._times(plan.total_num_tokens)
        noise = 1 + abs(self._random.gauss(0, self._noise))
        if self._noise and self._random.random() < DELAYED:
            noise *= 1 + 3 * self._random.random()
        outputs = self.scheduler.apply(self._result(plan), seconds=milliseconds * noise / 1e3)
        num_finished = sum(chunk.finish_reason is not None for _, chunk in outputs.chunks)
        return 0.0 if plan.new_rows else milliseconds, num_finished

    def _result(self, plan: StepPlan) -> StepResult:
        """Return the next token of each row, and those of its drafts that are right."""
        self._rows |= {new.row: list(reversed(self._outputs[new.request_id])) for new in plan.new_rows}
        token_ids: list[int] = []
        checked: dict[int, list[int]] = {}
        for row in plan.rows:
            left = self._rows[row]
            token_ids.append(left.pop())
            last = token_ids[-1]
            for drafted in plan.drafts.get(row, []):
                if last != drafted:
                    break
                last = left.pop()
                checked.setdefault(row, []).append(last)
        return StepResult(step=plan.step, rows=plan.rows, token_ids=token_ids, checked_token_ids=checked)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", nargs="+", choices=list(TIMES), default=list(TIMES))
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--noise", type=float, default=0.15)
    arguments = parser.parse_args()
    texts = Texts(arguments.tokens, vocab_size=8000)
    print("gain of a group, and of its requests on average; accepted of drafted tokens")
    try:
        for workload in arguments.workload:
            make_groups, counts = WORKLOADS[workload]
            for count in counts:
                name = f"{workload} x {count}"
                rounds = [
                    make_groups(texts, random.Random(f"{name} {number}"), count) for number in range(arguments.rounds)
                ]
                for model in arguments.times:
                    print(f"  {name:<14}{model:<12}" + "   ".join(figures(rounds, TIMES[model], arguments.noise)))
                sys.stdout.flush()
    finally:
        texts.close()


def figures(rounds: list[list[Group]], times: Callable[[int], float], noise: float) -> list[str]:
    """Return the figures of each method, with a new engine."""
    off = Simulation(None, times, noise)
    without = [off.run(groups) for groups in rounds]
    each = []
    for method, options in METHODS.items():
        if (options := speculation(options)) is None:
            continue
        simulation = Simulation(Drafter(options), times, noise)
        found = [simulation.run(groups) for groups in rounds]
        gain = sum(one.groups for one in without) / sum(one.groups for one in found)
        of_request = sum(one.request for one in without) / sum(one.request for one in found)
        stats = simulation.scheduler.stats()
        each.append(
            f"{method} {gain:.2f} {of_request:.2f} ({stats.num_accepted_tokens:5} of {stats.num_draft_tokens:5})"
        )
    return each


if __name__ == "__main__":
    main()
