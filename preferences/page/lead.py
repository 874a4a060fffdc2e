"""What a lead sees: counts at once, statistics of a batch, everything as a file."""
