"""Heed's packages, whose names are common words: where they are, and what hides one. Standard library only."""

import sys
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]

# The package list of the project, from the roof down. `benchmarks` is left out: no run needs it.
PACKAGES = (
    "heed", "evaluation", "sft", "dpo", "ppo", "reward", "pretrain", "stages", "cluster", "training", "lm",
    "preferences", "files", "configs",
)  # fmt: skip


def source_tree() -> str:
    """Returns the folder of this code if it is a checkout; "" if it is installed as a package or shipped with a job."""
    return str(ROOT) if (ROOT / "pyproject.toml").is_file() else ""


def hiding_file(package: str) -> str:
    """Returns the file or folder that Python finds in place of one of Heed's packages; "" if it finds Heed's."""
    spec = find_spec(package)
    if spec is None:
        return ""
    found = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
    return "" if found == str(ROOT / package / "__init__.py") else found


def refuse_hidden() -> None:
    """Raise ImportError naming the file that hides one of Heed's packages, and what to do about it."""
    for package in PACKAGES:
        hiding = hiding_file(package)
        if hiding:
            folder = Path(hiding).parents[1 if hiding.endswith("__init__.py") else 0]
            where = "PYTHONPATH" if str(folder) in sys.path else "Python's search path"
            raise ImportError(f"{hiding} hides Heed's package {package!r}: rename it, or take {folder} out of {where}")
