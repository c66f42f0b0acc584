"""Embeds texts, and writes the vectors.

python examples/ray_data/embed.py --model MODEL [--texts FILE] [--vectors DIRECTORY]

FILE has a text in each line; without it the program embeds its own lines. MODEL is an embedding model, such as
Qwen/Qwen3-Embedding-0.6B, or any other with `--convert`.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet
import ray.data

import eagleray.data


def absolute_path(text: str) -> Path:
    """Return a path that all workers of Ray resolve alike."""
    return Path(text).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint or an id; by default the embedded model, with `--convert`")
    parser.add_argument("--convert", action="store_true", help="embed by a model that generates")
    parser.add_argument("--texts", type=absolute_path, default=Path(__file__))
    parser.add_argument("--vectors", type=absolute_path, default=Path(tempfile.gettempdir()) / "eagleray-vectors")
    args = parser.parse_args()
    ray.init(include_dashboard=False)

    ds = ray.data.read_text(str(args.texts))
    ds = eagleray.data.embed(
        ds, args.model, prompt_column="text", errors="raise", convert="embed" if args.convert else "auto"
    )
    ds.write_parquet(str(args.vectors), mode="overwrite")

    table = pyarrow.parquet.read_table(args.vectors)
    texts, vectors = table["text"].to_pylist(), np.array(table["embedding"].to_pylist())
    best = int(np.argmax(vectors[1:] @ vectors[0])) + 1
    print(f"{vectors.shape[0]} vectors of {vectors.shape[1]} features in {args.vectors}")
    print(f"The line that is closest to {texts[0]!r} is {texts[best]!r}")


if __name__ == "__main__":
    main()
