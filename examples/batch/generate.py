"""Prompts from an iterator, completed as fast as the engines can: `python examples/batch/generate.py`."""

from __future__ import annotations

from collections.abc import Iterator

from eagleray import LLM, RequestError, SamplingParams


def prompts() -> Iterator[str]:
    """Yield prompts while they are needed, as a program that reads them from files would."""
    for name in ("path", "string", "list", "file", "date"):
        yield f"Return the {name}"
    yield "too long " * 10_000


def main() -> None:
    llm = LLM(data_parallel_size=2)  # two engines with the embedded model
    num_failed = 0
    params = SamplingParams(temperature=0, max_tokens=16)
    for index, output in llm.generate_as_completed(prompts(), params, errors="return"):
        if isinstance(output, RequestError):
            num_failed += 1
            print(f"prompt {index} failed: {output.message}")
        else:
            print(f"prompt {index}: {output.prompt!r} -> {output.outputs[0].text!r}")
    assert num_failed == 1, "only the long prompt has an error"


if __name__ == "__main__":
    main()
