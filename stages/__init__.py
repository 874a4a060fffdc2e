"""What every stage has in common: its run, its lineage, its progress, the world that it may learn from."""
