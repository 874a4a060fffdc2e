"""Over-optimisation of a reward model: gold score against distance from the reference (Gao et al. 2022)."""
