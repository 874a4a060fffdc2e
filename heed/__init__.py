"""The command line: job file, stages, lineage, report."""

import os

# Before PyTorch loads OpenMP, as for workers (cluster/group.py): threads spin a moment while they wait, then sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
