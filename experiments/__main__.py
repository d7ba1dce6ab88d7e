"""Run the experiments of the paper: `python -m experiments`."""

from fmwc.__main__ import main

if __name__ == "__main__":
    main("experiments.cli", "python -m experiments")
