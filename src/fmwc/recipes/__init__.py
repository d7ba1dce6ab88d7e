"""Recipes: one frozen dataclass each, with the reason beside every literal."""
