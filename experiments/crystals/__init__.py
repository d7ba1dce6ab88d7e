"""The experiment on inorganic crystals (MP-20)."""
