"""Files and folders, the lowest package: atomic writes, hashes, locks, and records in JSON."""
