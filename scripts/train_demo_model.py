"""Train the small Qwen3-MoE checkpoint that ships in `eagleray/demo_model`.

    python scripts/train_demo_model.py --minutes 100 --export eagleray/demo_model

The text comes from Python's standard library and this repository (`demo_model/corpus.py`), the questions from the files
in `demo_model/facts`, so the model can be made again anywhere, without a download, on two CPU cores. A run saves itself
in --work-dir every few minutes and on SIGTERM or ctrl-C; the same command continues from there. At the end the model is
checked and asked the held-out questions (`evaluate_demo_model.py`); only a good one is copied to --export.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

# The C library and OpenMP read these when a process starts, hence the re-exec in `main`. Freed memory is kept, in huge
# pages, because faulting it in again costs as much as the arithmetic. Threads sleep at a barrier, because on a shared
# machine spinning for a partner that is not scheduled is several times slower.
PROCESS_ENV = {
    "OMP_WAIT_POLICY": "passive",
    "MALLOC_MMAP_THRESHOLD_": str(2**33),
    "MALLOC_TRIM_THRESHOLD_": str(2**34),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def main() -> None:
    if any(os.environ.get(name) != value for name, value in PROCESS_ENV.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | PROCESS_ENV)
    parser = argparse.ArgumentParser(description="Train the demo model, or carry on with a run that was stopped.")
    parser.add_argument("--minutes", type=float, default=100, help="training time over which the learning rate anneals")
    parser.add_argument("--steps", type=int, help="anneal over this many steps instead")
    parser.add_argument("--facts", type=int, metavar="N", help="learn only N of the facts, for a short trial")
    parser.add_argument("--work-dir", type=Path, default=Path(tempfile.gettempdir()) / "eagleray-demo-model")
    parser.add_argument("--export", type=Path, metavar="DIR", help="where to write the checkpoint at the end")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()

    import torch
    from demo_model.training import Budget, TrainingRun

    torch.set_num_threads(args.threads)
    args.work_dir.mkdir(parents=True, exist_ok=True)
    run = TrainingRun(args.work_dir, Budget(args.minutes, args.steps), args.facts)
    run.train()
    if args.export and run.progress == 1.0:
        from demo_model.export import export

        if not export(run, args.work_dir / "export", args.export, args.facts):
            sys.exit(1)


if __name__ == "__main__":
    main()
