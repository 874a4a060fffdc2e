"""The command line: job file, stages, lineage, report."""

import os

# Before PyTorch loads OpenMP: threads that spin while they wait stop whatever else the machine does (docs/log.md).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
