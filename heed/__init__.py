"""The command line: job file, stages, lineage, report."""
