"""The experiments of the paper, and their tables. Not installed with fmwc: run `python -m experiments`."""
