"""Weights changed by a worker extension, and changed back: `python examples/worker_extension/change_weights.py`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

import eagleray
from eagleray import LLM, SamplingParams

NAME = "model.norm.weight"


def main() -> None:
    # workers find the extension by PYTHONPATH
    os.environ["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    (file,) = (Path(eagleray.__file__).parent / "demo_model").glob("*.safetensors")
    weight = load_file(file)[NAME].float().numpy()

    llm = LLM(tensor_parallel_size=2, worker_extension_cls="npz_loader:NpzLoader")
    for place in llm.collective_rpc("where", timeout=10):
        print(place)
    before = complete(llm)
    with tempfile.TemporaryDirectory() as directory:
        for title, values in (("negated", -weight), ("restored", weight)):
            path = str(Path(directory) / f"{title}.npz")
            np.savez(path, **{NAME: values})
            print(title, llm.collective_rpc("load_npz", args=[path], timeout=60))
            after = complete(llm)
            assert (after == before) == (title == "restored")


def complete(llm: LLM) -> str:
    (output,) = llm.generate("Return the", SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)
    print(repr(output.outputs[0].text))
    return output.outputs[0].text


if __name__ == "__main__":
    main()
