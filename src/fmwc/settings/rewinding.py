"""Spending evaluations on the most doubtful samples: what `fmwc rewind` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from fmwc.confidence.rewinding import resample
from fmwc.errors import UsageError
from fmwc.files import claimed
from fmwc.settings.samples import Outcome, open_samples, ranked_by_variance, within_condition, write_rows
from fmwc.settings.setting import say_on_stderr

__all__ = ["rewind_samples"]

MOST_EXTRA = 100_000


def rewind_samples(
    samples: Path,
    out: Path,
    *,
    extra: int,
    device: torch.device,
    share: float = 0.1,
    before: float = 0.2,
    scale: float = 0.2,
    fresh: bool = False,
    checkpoint: str = "",
    judge: str = "",
    seed: int = 0,
    force: bool = False,
) -> Outcome:
    """Takes the most doubtful samples back to before they were undecided, round after round, and keeps what is surer.

    Arguments:
        samples: What `fmwc sample` wrote: the folder, or the file.
        out: A folder to write to.
        extra: Evaluations of the network to spend, a sample, over all of them. The ways up to now, which files do not
            hold, are made again on top of that.
        share: The share of samples that are taken back in a round.
        before: How long before the critical time.
        scale: The standard deviation of the noise, in each channel's training unit.
        fresh: Start over from new noise in place of going back: the baseline.
        checkpoint, judge, seed, force: As `edit_samples` takes them.
    """
    if not 1 <= extra <= MOST_EXTRA:
        raise UsageError(f"--extra lies between 1 and {MOST_EXTRA:,} evaluations per sample, got {extra}")
    if not 0 < share <= 1:
        raise UsageError(f"--share lies in (0, 1], got {share}")
    if not before >= 0 or not 0 <= scale < float("inf"):
        raise UsageError(f"--before and --scale are at least 0; got {before} and {scale}")
    opened = open_samples(samples, out, device, checkpoint, judge)
    setting, field, options = opened.setting, opened.field, opened.options
    run = ranked_by_variance(opened.run, field, setting)
    read_again = opened.reads_again(run) and not (fresh and len(run.times))
    if not read_again and not len(run.times):
        raise UsageError("this run kept no variance to rewind by; draw the samples without --propagation none")
    run.score()  # what is missing for a score is said before anything is computed
    origin, again = run, 0
    with claimed(out, "rewind", force=force):
        if read_again or not fresh:
            say_on_stderr(f"recomputing {len(run)} trajectories")
            origin, again = opened.with_states(run)
        origin = within_condition(origin, field)
        doubt = origin.score()
        say_on_stderr(f"rewinding with {extra * len(run)} evaluations")
        found = resample(
            field,
            origin,
            extra * len(run),
            share=share,
            before=before,
            scale=scale,
            fresh=fresh,
            seed=seed,
            **options,
        )
        way = opened.way_read_again if read_again else opened.way
        made = replace(way, by="sample" if fresh else "rewind", selected="rewind").record()
        done = replace(found.run, states=None, made=made)
        branch, after = found.branch.cpu(), done.score()
        table = {
            "sample": list(range(len(run))),
            "branch": branch.tolist(),
            "score_before": doubt.tolist(),
            "score_after": after.tolist(),
        }
        rows = [
            {"": "evaluations per sample", "value": f"{found.evaluations / len(run):.2f} of {extra}"},
            {"": "changed", "value": f"{(branch > 0).double().mean():.1%} of {len(run)} samples"},
            {"": f"{origin.default_score}, mean", "value": f"{doubt.mean():.4g}, then {after.mean():.4g}"},
        ]
        if again:
            rows.insert(1, {"": "… and to recompute the trajectories", "value": f"{again / len(run):.0f}"})
        if setting.has_judge:
            bad = {name: np.asarray(setting.judge(one)) for name, one in (("before", run), ("after", done))}
            table |= {f"bad_{name}": judged.tolist() for name, judged in bad.items()}
            rows.append({"": setting.bad, "value": ", then ".join(f"{judged.mean():.1%}" for judged in bad.values())})
        written = setting.write_samples(done, out)
        written.append(write_rows(out / "rewound.csv", table))
    return Outcome(rows, written)
