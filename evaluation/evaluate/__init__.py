"""`heed evaluate`: models on suites, with their answers, statistics and report."""
