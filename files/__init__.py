"""Files and folders, below every other package: atomic writes, hashes, locks, and records in JSON."""
