"""Inorganic crystals of MP-20."""
