"""The command line: job file, stages, lineage, report."""

import os

from cluster.environment import WAITING

# Before PyTorch loads OpenMP. What the user has set stays.
os.environ.update({name: value for name, value in WAITING.items() if name not in os.environ})
