"""The command line."""

import os

from cluster.environment import WAITING

# Set before PyTorch loads OpenMP. Skipped if the user has set any of them: a spin count would override their policy.
if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)
