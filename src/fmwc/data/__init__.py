"""Data sets, and batches of your own data."""
