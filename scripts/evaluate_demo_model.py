"""Ask the embedded model, or another checkpoint of it, the questions that it has not seen in training.

    python scripts/evaluate_demo_model.py [DIRECTORY] [--limit 100] [--json FILE]

An answer is right if it contains the key words of the fact, and right word for word if it differs from the fact's
answer only in case and white space. Both shares are printed by kind of question (`demo_model/phrasings.py`), for greedy
decoding and for the model's default sampling parameters. Answers that reach 512 tokens or repeat a line more than three
times are printed as loops. The exit code is 1 if an answer loops or, with either decoding, fewer than 80 % of the
held-out phrasings are answered right.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from demo_model.evaluation import evaluate

DEMO_MODEL = Path(__file__).parents[1] / "eagleray" / "demo_model"


def main() -> int:
    parser = argparse.ArgumentParser(description="Ask a checkpoint of the demo model held-out questions.")
    parser.add_argument("checkpoint", type=Path, nargs="?", default=DEMO_MODEL)
    parser.add_argument("--limit", type=int, metavar="N", help="ask at most N questions of each kind")
    parser.add_argument("--facts", type=int, metavar="N", help="ask only about the N facts of a trial of the training")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    args = parser.parse_args()
    evaluation = evaluate(args.checkpoint, args.limit, args.facts)
    print(evaluation)
    if args.json:
        args.json.write_text(json.dumps(evaluation.as_json(), indent=2) + "\n", encoding="utf-8")
    return 0 if evaluation.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
