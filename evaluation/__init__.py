"""Samples policies, compares them with intervals, measures them, and runs benchmarks.

The modules, in the order in which to read them:

    what is compared      inputs, policies, verdicts, contamination
    comparing             compare/, judges/, statistics/
    measures              measures/
    benchmarks            suites/, evaluate/, harness (lm-evaluation-harness)
    exit codes            fail_if
"""
