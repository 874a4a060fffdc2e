"""The command line, and the order in which Python looks for modules: Heed's tree first, the current folder last.

Heed's packages have common names, and a user's folder may hold `sft.py`, `reward.py` or `datasets.py`.
"""

import os
import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]


def put_heed_first(path: list[str]) -> None:
    """Reorder `sys.path` in place: the current folder last, and this tree first if it is a checkout.

    `python -m heed` and `python -c` put the current folder first. A tree among installed packages keeps its place.
    """
    tree, here = str(ROOT), ""
    with suppress(OSError):  # the folder is gone
        here = os.getcwd()
    if here != tree and {"", here} & set(path):
        path[:] = [*(folder for folder in path if folder not in ("", here)), here]
    if (ROOT / "pyproject.toml").is_file():
        path[:] = [tree, *(folder for folder in path if folder != tree)]


def require_visible_packages() -> None:
    """End this process with one line if a file hides one of Heed's packages, which PYTHONPATH can cause."""
    try:
        spec = find_spec("files")  # this package lists all others
        if spec is None or spec.origin != str(ROOT / "files" / "__init__.py"):
            hiding = spec.origin if spec else "nothing"
            raise ImportError(f"{hiding} hides Heed's package 'files': rename it, or remove its folder from PYTHONPATH")
        from files.importing import refuse_hidden

        refuse_hidden()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None  # the exit code of every user mistake


put_heed_first(sys.path)
require_visible_packages()

from cluster.processes import WAITING  # noqa: E402  # only now can no file in the current folder hide it

# Set before PyTorch loads OpenMP. Skipped if the user has set any of them: a spin count would override their policy.
if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)
