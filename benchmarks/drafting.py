"""Speedup by drafts for given step times: the scheduler and its drafter run without a model or a clock.

python benchmarks/drafting.py [--times moe-1b dense-0.6b] [--workload copy text …] [--rounds 3] [--tokens 128]
                              [--noise 0.15] [--draft-model 0.9 0.7 0.4 0 --draft-time 0.1 --prompt 512]

The requests are the same as in `speculation.py`. The time of a step is looked up in a table of times that were measured
on two cores for its number of tokens; the drafter sees it with noise, as on a shared machine. So the figures are the
same in every run, and show whether drafting pays. They leave out the scheduler's own time and the rounds in which
drafts are checked.

With --draft-model a draft model proposes tokens instead, each of which is right with the given probability if those
before are. A pass of it takes the part --draft-time of a step's time for as many tokens, and its computation of prompts
counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from speculation import METHODS, WORKLOADS, Case, Group, Texts

from eagleray.config.speculation import speculation
from eagleray.identity import ClientId
from eagleray.messages.requests import Generate
from eagleray.messages.sampling import Sampling, Stopping
from eagleray.messages.steps import Proposal, StepPlan, StepResult
from eagleray.scheduler.history_drafter import HistoryDrafter
from eagleray.scheduler.model_drafter import ModelDrafter
from eagleray.scheduler.scheduler import Scheduler
from eagleray.scheduler.speculation import Drafter

CLIENT = ClientId("benchmark", 0)
BUDGET = 65_536
"""Tokens of a step: all prompts of a group are one step, which does not count."""


def measured(milliseconds: dict[int, float]) -> Callable[[int], float]:
    """Return the time of a step as a function of its tokens, interpolated from measurements and extended beyond."""
    counts, times = list(milliseconds), list(milliseconds.values())
    each = (times[-1] - times[-2]) / (counts[-1] - counts[-2])
    return lambda count: float(np.interp(count, counts, times)) + each * max(0, count - counts[-1])


TIMES: dict[str, Callable[[int], float]] = {
    "moe-1b": lambda count: 8.0 + 1.1 * count if count < 5 else 12.0 + 1.1 * count,
    "dense-0.6b": lambda count: max(40.0, 40.0 + 3.0 * (count - 9)),
    "dense-tiny": lambda count: 0.45 + 0.075 * count,
    "moe-1b-amx": measured(
        {1: 25, 2: 39, 3: 51, 4: 61, 6: 73, 8: 96, 12: 110, 16: 123, 24: 144, 32: 143, 48: 157, 64: 164}
    ),
    "dense-0.6b-amx": measured({1: 72, 2: 75, 4: 77, 6: 78, 8: 88, 12: 97, 16: 96, 24: 114, 32: 116, 48: 164, 64: 182}),
}
"""Milliseconds of a step by its number of tokens: with two cores and vector instructions, and, by `forward.py --steps`,
with one core and matrix instructions, of one row up to 6 tokens and of 8 rows beyond."""

DELAYED = 0.03
"""Part of the steps that something else delays, by up to three times their time."""


class Simulated(NamedTuple):
    """Milliseconds of groups of requests, and of each request on average."""

    groups: float
    request: float


class Guesses(NamedTuple):
    """A draft model."""

    probability: float
    """Probability that a token is right if all before it are."""
    time: float
    """Time of a pass in units of a step's for as many tokens."""


class Simulation:
    """A scheduler, with a drafter or without one. `guesses`: the draft model that it uses."""

    def __init__(
        self,
        drafter: Drafter[Any] | None,
        times: Callable[[int], float],
        noise: float,
        guesses: Guesses | None = None,
    ) -> None:
        self._times = times
        self._guesses = guesses
        self._num_cached: dict[int, int] = {}
        """Number of tokens of each row that the draft model has computed."""
        self._num_tokens: dict[int, int] = {}
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
        result = self._result(plan)
        of_passes = 1e3 * sum(seconds for _, seconds in result.draft_passes)
        milliseconds = self._times(plan.total_num_tokens) + of_passes
        noise = 1 + abs(self._random.gauss(0, self._noise))
        if self._noise and self._random.random() < DELAYED:
            noise *= 1 + 3 * self._random.random()
        outputs = self.scheduler.apply(result, seconds=milliseconds * noise / 1e3)
        chunks = [chunk for one in outputs.by_client.values() for chunk in one.chunks]
        num_finished = sum(chunk.finish_reason is not None for chunk in chunks)
        return 0.0 if plan.new_rows else milliseconds, num_finished

    def _result(self, plan: StepPlan) -> StepResult:
        """Return the next token of each row, those of its drafts that are right, and proposals."""
        self._num_tokens |= {new.row: len(new.token_ids) for new in plan.new_rows}
        self._num_cached |= {new.row: 0 for new in plan.new_rows}
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
            self._num_tokens[row] += 1 + len(checked.get(row, ()))
        proposals, passes = self._propose(plan)
        return StepResult(
            step=plan.step,
            rows=plan.rows,
            token_ids=token_ids,
            checked_token_ids=checked,
            proposals=proposals,
            draft_passes=passes,
        )

    def _propose(self, plan: StepPlan) -> tuple[dict[int, Proposal], list[tuple[int, float]]]:
        """Return what the draft model proposes, and its passes."""
        if self._guesses is None or not plan.proposals:
            return {}, []
        proposals = {}
        num_uncached = 0
        for row, count in plan.proposals.items():
            following = self._rows[row][::-1][:count]
            guesses = [token if self._random.random() < self._guesses.probability else -1 for token in following]
            proposals[row] = Proposal(guesses, self._num_tokens[row])
            num_uncached += self._num_tokens[row] - self._num_cached[row]
            self._num_cached[row] = self._num_tokens[row]
        counts = list(plan.proposals.values())
        sizes = [num_uncached, *(sum(count > depth for count in counts) for depth in range(1, max(counts)))]
        return proposals, [(size, self._guesses.time * self._times(size) / 1e3) for size in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", nargs="+", choices=list(TIMES), default=list(TIMES))
    parser.add_argument("--workload", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--draft-model", nargs="+", type=float, metavar="PROBABILITY")
    parser.add_argument("--draft-time", type=float, default=0.1)
    parser.add_argument("--prompt", type=int, default=512)
    arguments = parser.parse_args()
    if arguments.draft_model:
        measure_draft_models(arguments)
        return
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


def measure_draft_models(arguments: argparse.Namespace) -> None:
    """Print the figures of draft models of several probabilities, each with a new engine for each number of
    requests."""
    print("gain of a group, and of its requests on average; accepted of drafted tokens")
    for model in arguments.times:
        for probability in arguments.draft_model:
            for count in (1, 8, 16):
                choose = random.Random(f"{count}")
                draw = lambda length: [choose.randrange(10, 8000) for _ in range(length)]  # noqa: B023, E731
                rounds = [
                    [[Case(draw(arguments.prompt), draw(arguments.tokens)) for _ in range(count)]]
                    for _ in range(arguments.rounds)
                ]
                options = speculation({"method": "draft_model", "model": "draft", "num_speculative_tokens": 5})
                assert options is not None
                guesses = Guesses(probability, arguments.draft_time)
                simulation = Simulation(ModelDrafter(options), TIMES[model], arguments.noise, guesses)
                figure = figure_of(simulation, rounds, TIMES[model], arguments.noise)
                print(f"  {model:<12}right {probability:<5}x {count:<3}{figure}")
                sys.stdout.flush()


def figures(rounds: list[list[Group]], times: Callable[[int], float], noise: float) -> list[str]:
    """Return the figures of each method, with a new engine."""
    each = []
    for method, options in METHODS.items():
        if (options := speculation(options)) is None:
            continue
        simulation = Simulation(HistoryDrafter(options), times, noise)
        each.append(f"{method} {figure_of(simulation, rounds, times, noise)}")
    return each


def figure_of(simulation: Simulation, rounds: list[list[Group]], times: Callable[[int], float], noise: float) -> str:
    """Return the gains of a simulation compared with one without drafts."""
    off = Simulation(None, times, noise)
    without = [off.run(groups) for groups in rounds]
    found = [simulation.run(groups) for groups in rounds]
    gain = sum(one.groups for one in without) / sum(one.groups for one in found)
    of_request = sum(one.request for one in without) / sum(one.request for one in found)
    stats = simulation.scheduler.stats()
    return f"{gain:.2f} {of_request:.2f} ({stats.num_accepted_tokens:5} of {stats.num_draft_tokens:5})"


if __name__ == "__main__":
    main()
