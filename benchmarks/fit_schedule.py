"""Choose the few times at which the variance of a shipped checkpoint is read, and write them next to its weights.

    python -m benchmarks.fit_schedule crystals --pilot 1000
    python -m benchmarks.fit_schedule mnist --pilot 1000 --device cuda

The times are chosen on a pilot run of a separate seed that is read at every step of the score, without outcomes. Prints
the agreement of fewer and of more readings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import fmwc
from fmwc.checkpoint import update
from fmwc.progress import sampling_bar
from fmwc.provenance import Clock, pick_device
from fmwc.registry import DOMAINS, domain_named
from fmwc.sampling import SamplingConfig, Schedule, Trajectory, fit_schedule
from fmwc.sampling.pilot import READINGS
from fmwc.sampling.trajectory import parsed

STEPS, SEED = 50, 100
FEWER = {"mnist": 2}  # each has two probes, so it costs more
WEIGHTS = Path(fmwc.__file__).parent / "weights"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=list(DOMAINS))
    parser.add_argument("--pilot", type=int, default=1000, help="samples")
    parser.add_argument("--readings", type=int, default=0, help="number of readings; default: that of the setting")
    parser.add_argument(
        "--draws", type=Path, help="a pilot run that was read at every step by the estimator of the setting"
    )
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="the folder of a checkpoint; default: the shipped one")
    arguments = parser.parse_args()
    device, setting = pick_device(arguments.device), domain_named(arguments.setting)
    chosen = arguments.readings or FEWER.get(setting.name, READINGS)
    clock, field = Clock(device), fmwc.load(setting.name, device=device)
    reading = setting.estimator(field)
    _, score, window = parsed(field.reference.score)
    window = {} if score == "temporal_ratio" else window  # the ratio has two windows
    # Include the step after the window, up to which its last reading counts.
    times = [k / STEPS for k in range(STEPS) if window.get("early", 0) <= k / STEPS <= window.get("late", 1)]
    if arguments.draws:
        run = Trajectory.load(arguments.draws)
    else:
        with sampling_bar("a pilot run", arguments.pilot) as bar:
            run = setting.draw(
                field,
                arguments.pilot,
                SEED,
                bar,
                confidence=reading,
                schedule=Schedule.at(times) if window else Schedule.every(1),
                config=SamplingConfig(record="total"),
            )
    for readings in range(1, 7):
        try:
            found = fit_schedule(field, readings, pilot=run, steps=STEPS, confidence=reading)
        except fmwc.errors.UsageError as error:
            print(f"{readings} readings: {error}")
            continue
        print(f"{readings} readings: {found.times}, correlation with all {len(run.times)} {found.agreement:.4f}")
        if readings == chosen:
            update(arguments.out or WEIGHTS / setting.name, schedule=found)
    print(f"{len(run)} samples, {clock.seconds:.0f} s")


if __name__ == "__main__":
    main()
