"""Draw crystals in two rounds and learn from labels: draw, judge, learn, draw again, and keep with a promise.

python examples/label_loop.py --out loop

The judge (CHGNet) takes the place of DFT. To use results of your own, write a table with the columns `name` and
`e_above_hull`, and give it to `--labels` instead of the judge's folder. A row without a value has no label.

1. Draw crystals, judge all of them, and fit a head to the labels.
2. Draw more crystals with another seed, ranked by the head. Judge the first of them, which are a random choice.
3. Keep as many as possible, such that the share of failures is at most `--max-risk` with probability 0.9.

The commands are printed, and can be repeated in a shell. An interrupted loop continues when it is called again.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

UNJUDGED = 1  # exit code of fmwc judge if some structures cannot be judged; the table gives the reasons


def fmwc(*words: object) -> None:
    """Print and run a command."""
    command = ["fmwc", *map(str, words)]
    print("$", shlex.join(command if len(command) < 20 else [*command[:8], "…", *command[-4:]]), flush=True)
    code = subprocess.run([sys.executable, "-m", *command]).returncode
    if code not in (0, UNJUDGED if words[0] == "judge" else 0):
        sys.exit(code)


def loop(checkpoint: str, out: Path, count: int, more: int, good: str, max_risk: float, *options: object) -> None:
    """Run the loop.

    Arguments:
        checkpoint: A shipped name or a folder.
        out: The folder of all results.
        count: The number of crystals that are judged in each round.
        more: The number of crystals of the second round.
        good: The condition that good crystals fulfil.
        max_risk: The share of failures that is allowed among the kept crystals.
        options: Further options of `fmwc sample`.
    """
    first, second, judged = out / "first", out / "second", [out / "first-judged", out / "second-judged"]
    how = ("--every", 5, *options)  # the variance is evidence for the head
    fmwc("sample", checkpoint, "-n", count, "--seed", 0, *how, "--out", first)
    fmwc("judge", first / "cif", "--out", judged[0], "--force")
    fmwc("learn", first, "--labels", judged[0], "--good", good, "--out", out / "head", "--force")
    fmwc("sample", checkpoint, "-n", more, "--seed", 1, "--head", out / "head", *how, "--out", second)
    fmwc("judge", *sorted((second / "cif").iterdir())[:count], "--out", judged[1], "--force")
    labels = ("--labels", judged[1], "--good", good)
    fmwc("filter", second, "--max-risk", max_risk, *labels, "--out", out / "kept", "--force")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", default="crystals")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=200, help="crystals that are judged in each round")
    parser.add_argument("--more", type=int, default=600, help="crystals of the second round")
    parser.add_argument("--good", default="e_above_hull <= 0.1", help="condition of good crystals")
    parser.add_argument("--max-risk", type=float, default=0.4, help="share of failures allowed among the kept")
    options = parser.parse_args()
    loop(options.checkpoint, options.out, options.count, options.more, options.good, options.max_risk)


if __name__ == "__main__":
    main()
