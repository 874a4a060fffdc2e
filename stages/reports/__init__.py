"""The report of a run: report.json with every number and its source, and report.html for reading."""
