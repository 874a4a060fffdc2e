"""The command line: job file, stages, lineage, report."""

import os

from cluster.environment import WAITING

# Before PyTorch loads OpenMP. A count of spins would overrule the policy that a user has set.
if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)
