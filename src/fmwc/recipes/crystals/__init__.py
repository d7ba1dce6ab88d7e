"""Inorganic crystals: the paper's third setting."""
