"""Scores of responses: samples for labelers, a reward model that learns from preferences, and other rewards.

The modules, in the order in which to read them:

    the reward model      config, stage, report
    rankings              comparisons, prepared
    its training          objective, metrics
    scores and samples    scoring, sampling
    samples for labelers  collect
    other rewards         sources (all kinds), external, endpoint, rubric, judge, verifiers/
"""
