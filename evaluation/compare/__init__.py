"""Comparisons of policies: their folder, their judges, their report."""
