"""`heed chaos`: a job under random faults must end with the bits of the same job left alone."""
