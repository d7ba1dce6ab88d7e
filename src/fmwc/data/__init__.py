"""Data sets: real loaders."""
