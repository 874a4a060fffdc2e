"""Samples policies and compares them, with intervals; measures them; and asks benchmarks.

The modules, in the order in which to read them:

    what is compared      inputs, policies, verdicts
    comparing             compare/, judges/, statistics/
    measures              measures/
    benchmarks            suites/, evaluate/, harness (lm-evaluation-harness)
"""
