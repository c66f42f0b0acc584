"""`eagleray generate [MODEL]`: complete prompts from the arguments or from standard input, without a server."""

from __future__ import annotations

import argparse
import sys

from eagleray.cli.options import program_options
from eagleray.config.flags import add_config_flags
from eagleray.llm import LLM

SECTIONS = ("model", "parallel", "cache", "scheduling", "execution", "recovery", "ray", "observability")
SAMPLING_FLAGS = {
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "n": int,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--prompt", action="append", help="a prompt; may be repeated (default: one from standard input)"
    )
    parser.add_argument("--chat", action="store_true", help="each prompt is the message of a user, to be answered")
    for name, kind in SAMPLING_FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), type=kind, help="as in `SamplingParams`")
    parser.add_argument("--stop", action="append", help="end where this text appears; may be repeated")
    add_config_flags(parser, sections=SECTIONS)


def run(arguments: argparse.Namespace) -> None:
    prompts = arguments.prompt or [sys.stdin.read()]
    given = {name: value for name in (*SAMPLING_FLAGS, "stop") if (value := getattr(arguments, name)) is not None}
    with LLM(**program_options(arguments, sections=SECTIONS)) as llm:
        params = llm.get_default_sampling_params(**given)
        if arguments.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
    for output in outputs:
        for choice in output.outputs:
            print(choice.text)
