"""Code shared by the experiments."""
