"""What all stages have in common: run, lineage, progress, planning, reports, and the world that they may learn from."""
