"""Comparing policies: win rates, tests, ratings, length and position, each with an interval over prompts."""
