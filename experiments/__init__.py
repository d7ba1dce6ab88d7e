"""The experiments of the paper and their tables, run with `python -m experiments`. Not installed with fmwc."""
