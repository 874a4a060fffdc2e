"""Stage 5: proximal policy optimisation against the reward model."""
