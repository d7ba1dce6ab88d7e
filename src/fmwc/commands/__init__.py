"""What each command does, as a function: `from fmwc.commands.sample import draw_samples`."""
