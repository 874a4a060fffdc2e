"""The Python environment of an engine that pins other versions than Heed."""

import subprocess
from importlib.metadata import version
from pathlib import Path

DEFAULT = Path(__file__).parents[1] / ".vllm" / "bin" / "python"

# Without importing either, which takes seconds.
_ASKED = """
from importlib.metadata import version
from importlib.util import find_spec
print(*[name for name in ("vllm", "samplers", "ray") if find_spec(name) is None] or ["ray", version("ray")])
"""


def require_vllm(python: str = "") -> str:
    """The interpreter that has vLLM, Heed, and the Ray of this one; empty = the one that `make vllm` makes.

    Raises: ValueError saying what is missing and how to get it.
    """
    path = Path(python or DEFAULT).expanduser()
    remedy = "run `make vllm`, or name another with ppo.generator_python" if not python else "docs/samplers.md says how"
    if not path.is_file():
        raise ValueError(f"there is no Python with vLLM at {path}: {remedy}")
    asked = subprocess.run([str(path), "-c", _ASKED], capture_output=True, text=True, check=False, cwd="/")
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{path} does not run: {last}")
    found = asked.stdout.split()
    if found[0] != "ray" or len(found) != 2:
        raise ValueError(f"{path} has no {' and no '.join(found)}: {remedy}")
    if found[1] != version("ray"):
        raise ValueError(f"{path} has Ray {found[1]}, and Heed here has Ray {version('ray')}: {remedy}")
    return str(path.absolute())
