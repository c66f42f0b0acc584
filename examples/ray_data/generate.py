"""Reads prompts, has a model complete them, and writes the answers. Started again after it was killed, it continues.

python examples/ray_data/generate.py [--prompts DIRECTORY] [--answers DIRECTORY] [--model MODEL]

Prompts are Parquet files with the columns `id` and `prompt`; without `--prompts` the program writes some. It joins the
Ray cluster that runs here, or starts one. On a cluster the directories must be ones that all nodes see.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import pyarrow.parquet
import ray.data

import eagleray.data


def write_prompts(directory: Path, num_rows: int = 100) -> None:
    """Write prompts for a trial."""
    verbs = ["Return", "Raise", "Print", "Compute", "Parse"]
    rows = [{"id": number, "prompt": f"{verbs[number % len(verbs)]} the"} for number in range(num_rows)]
    ray.data.from_items(rows).write_parquet(str(directory))


def absolute_path(text: str) -> Path:
    """Return a path that all workers of Ray resolve alike."""
    return Path(text).resolve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=absolute_path)
    parser.add_argument("--answers", type=absolute_path, default=Path(tempfile.gettempdir()) / "eagleray-answers")
    parser.add_argument("--model", help="a checkpoint or an id; by default the embedded model")
    args = parser.parse_args()
    ray.init(include_dashboard=False)
    if args.prompts is None:
        args.prompts = args.answers / "prompts"
        if not args.prompts.exists():
            write_prompts(args.prompts)

    # Ray Data notes which rows were written, and skips them when the program is started again.
    ray.data.DataContext.get_current().checkpoint_config = {
        "id_column": "id",
        "checkpoint_path": str(args.answers / "checkpoint"),
        "delete_checkpoint_on_success": False,
    }

    ds = ray.data.read_parquet(str(args.prompts))
    ds = eagleray.data.generate(
        ds,
        args.model,
        sampling_params={"max_tokens": 24, "temperature": 0.0},
        actor_options={"num_cpus": 0},  # a machine with two cores has none to spare; leave this out on a cluster
    )
    ds.write_parquet(str(args.answers / "rows"))

    answers = pyarrow.parquet.read_table(args.answers / "rows").sort_by("id")
    assert len(answers) == len(set(answers["id"].to_pylist())), "each row is written once"
    num_failed = len(answers) - answers["error"].null_count
    print(f"{len(answers)} rows in {args.answers / 'rows'}, {num_failed} of them with an error. The first:")
    for row in answers.slice(0, 3).to_pylist():
        print(f"{row['id']}: {row['prompt']} … {row['generated_text']!r}")


if __name__ == "__main__":
    main()
