"""The command line."""

import os
import sys

from heed.import_path import put_heed_first, require_visible_packages

put_heed_first(sys.path)
require_visible_packages()

from cluster.environment import WAITING  # noqa: E402  # only now can no file in the current folder hide it

# Set before PyTorch loads OpenMP. Skipped if the user has set any of them: a spin count would override their policy.
if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)
