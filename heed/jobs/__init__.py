"""A job from its file to a finished run: checks, stages in order, recovery, lineage, plans."""
