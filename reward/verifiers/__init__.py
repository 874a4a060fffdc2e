"""Rewards that check a response by a program."""
