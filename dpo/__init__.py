"""Direct preference optimisation: the policy learns from rankings without a reward model."""
