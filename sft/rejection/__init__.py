"""Rejection sampling: the policy learns from its own best samples, as a reward model sees them."""
