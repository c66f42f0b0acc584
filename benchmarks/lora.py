"""Cost of low-rank adapters: time per token of 16 concurrent requests without adapters, with one, and with 32.

python benchmarks/lora.py [--model dense-0.6b] [--rank 8] [--targets q_proj v_proj] [--tokens 64]
    [--repeat 5] [--threads N] [--trial]

All variants alternate on one engine, which has 32 adapters loaded; with 32, every request has a different one, and the
next run takes the other half of them. `option off` runs on a second engine, without the option. `--trial` runs
everything once with a tiny model, to test this program.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes import SHAPES, make

from eagleray import LLM, LoRARequest, SamplingParams
from eagleray_bench.alternating_runs import AlternatingRuns

NUM_REQUESTS = 16
NUM_ADAPTERS = 32
PROMPT_TOKENS = 16
ALL_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS = {"option off": 0, "no adapter": 0, "1 adapter": 1, "32 adapters": NUM_ADAPTERS}
"""Number of adapters that the requests of each variant choose from."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="dense-0.6b", choices=list(SHAPES))
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--targets", nargs="+", default=ALL_TARGETS, metavar="MODULE", help=f"some of {ALL_TARGETS}")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--trial", action="store_true")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-benchmarks")
    arguments = parser.parse_args()
    name = "dense-tiny" if arguments.trial else arguments.model
    repeat = 1 if arguments.trial else arguments.repeat
    checkpoint = make(name, arguments.directory)
    with tempfile.TemporaryDirectory() as directory:
        paths = [Path(directory) / str(i) for i in range(NUM_ADAPTERS)]
        adapters = [write_adapter(path, checkpoint, arguments.rank, arguments.targets) for path in paths]
        seconds = measure(checkpoint, adapters, arguments.rank, arguments.tokens, repeat, arguments.threads)
    print(f"{name}, rank {arguments.rank}, {' '.join(arguments.targets)}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print(f"ms per token of {NUM_REQUESTS} requests, {repeat} runs in turn: median (lowest to highest); ratio")
    first = statistics.median(seconds["no adapter"])
    for variant, times in seconds.items():
        median, spread = statistics.median(times), f"({1e3 * min(times):.2f} to {1e3 * max(times):.2f})"
        print(f"  {variant:<14}{1e3 * median:>9.2f} {spread:<22}{median / first:.3f}")


def write_adapter(directory: Path, checkpoint: Path, rank: int, targets: Sequence[str]) -> Path:
    """Write random factors for these projections of the checkpoint, in PEFT's format."""
    directory.mkdir()
    tensors = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(tuple(f".{target}.weight" for target in targets)):
                    outputs, inputs = file.get_slice(name).get_shape()
                    module = "base_model.model." + name.removesuffix(".weight")
                    tensors[f"{module}.lora_A.weight"] = 0.02 * torch.randn(rank, inputs, dtype=torch.bfloat16)
                    tensors[f"{module}.lora_B.weight"] = 0.02 * torch.randn(outputs, rank, dtype=torch.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "init_lora_weights": True}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def measure(
    checkpoint: Path, adapters: list[Path], rank: int, num_tokens: int, repeat: int, threads: int | None
) -> dict[str, list[float]]:
    """Return the seconds per token of each run, by variant."""
    options = {"max_model_len": 1024, "num_threads": threads, "enable_prefix_caching": False}
    requests = [LoRARequest(f"adapter-{i}", i, str(path)) for i, path in enumerate(adapters)]
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    with (
        LLM(str(checkpoint), **options) as plain,
        LLM(str(checkpoint), enable_lora=True, max_loras=NUM_ADAPTERS, max_lora_rank=rank, **options) as adapted,
    ):
        for request in requests:
            adapted.add_lora(request)
        for variant in VARIANTS:  # warm-up
            run(plain if variant == "option off" else adapted, choose(requests, VARIANTS[variant], 0), 4)
        for number, variant in enumerate(AlternatingRuns(count=repeat).order(list(VARIANTS))):
            llm = plain if variant == "option off" else adapted
            chosen = choose(requests, VARIANTS[variant], number // len(VARIANTS))
            seconds[variant].append((run(llm, chosen, num_tokens) - run(llm, chosen, 1)) / (num_tokens - 1))
    return seconds


def choose(requests: list[LoRARequest], num_adapters: int, turn: int) -> list[LoRARequest | None]:
    """Return the adapter of each request."""
    if num_adapters == 0:
        return [None] * NUM_REQUESTS
    return [requests[(turn * NUM_REQUESTS + i) % num_adapters] for i in range(NUM_REQUESTS)]


def run(llm: LLM, chosen: list[LoRARequest | None], num_tokens: int) -> float:
    """Return the seconds for this many tokens of each request."""
    prompts = [{"prompt_token_ids": [5 + i] * PROMPT_TOKENS} for i in range(NUM_REQUESTS)]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
