"""The program that `startup` starts: it makes an `LLM`, prints `ready`, generates one token and prints `answered`.

python -m eagleray_bench.first_answer '{"option of LLM": value}'
"""

from __future__ import annotations

import json
import sys

from eagleray import LLM, SamplingParams
from eagleray.errors import EagleRayError


def main(options: str) -> None:
    with LLM(**json.loads(options)) as llm:
        print("ready", flush=True)
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate({"prompt_token_ids": [1, 2, 3, 4]}, params, use_tqdm=False)
        print("answered", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except EagleRayError as error:
        sys.exit(f"{type(error).__name__}: {error}")
