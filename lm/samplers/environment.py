"""The Python environment of an engine that pins different versions from Heed."""

import os
import subprocess
import sys
from pathlib import Path

DEFAULT = Path(__file__).parents[2] / ".vllm" / "bin" / "python"

# The packages of Heed that both sides run: configs, rollouts and weights are pickled between them.
SHARED_PACKAGES = ("cluster", "lm", "ppo", "training")

# Prints what is missing, or else the versions. Does not import vLLM or Ray, which would take seconds.
_PROBE = """
import hashlib, pathlib, sys
from importlib.metadata import version
from importlib.util import find_spec
missing = [name for name in ("vllm", "lm", "ray") if find_spec(name) is None]
if missing:
    print("missing", *missing)
else:
    root, code = pathlib.Path(find_spec("lm").origin).parents[1], hashlib.sha256()
    for path in sorted(path for name in sys.argv[1:] for path in (root / name).rglob("*.py")):
        code.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    print(".".join(map(str, sys.version_info[:2])), version("ray"), code.hexdigest()[:16])
"""


def require_vllm(python: str = "", *, option: str = "ppo.sampler.python") -> str:
    """Returns an interpreter that has vLLM, and the same Python, Ray and Heed as this one.

    `python` is its path; "" = the one that `make vllm` makes. `option` is where the user names another one.

    Raises: ValueError saying what is missing and how to get it.
    """
    path = Path(python or DEFAULT).expanduser()
    remedy = f"run `make vllm`, or name another with {option}" if not python else "docs/samplers.md says how"
    if not path.is_file():
        raise ValueError(f"there is no Python with vLLM at {path}: {remedy}")
    kind, *found = _probed(path)
    if kind == "missing":
        raise ValueError(f"{path} has no {' and no '.join(found)}: {remedy}")
    own = _probed(Path(sys.executable), needs_vllm=False)
    for what, theirs, ours in zip(("Python", "Ray", "code of Heed"), (kind, *found), own, strict=True):
        if theirs != ours:
            raise ValueError(f"{path} has {what} {theirs}, and here it is {ours}: {remedy}")
    return str(path.absolute())


def _probed(python: Path, *, needs_vllm: bool = True) -> list[str]:
    probe = _PROBE if needs_vllm else _PROBE.replace('"vllm", ', "")
    command = [str(python), "-c", probe, *SHARED_PACKAGES]
    # Ranks import the code that came with the job, whichever Heed their interpreter has.
    came_with_job = {"PYTHONPATH": str(Path(__file__).parents[2])} if "HEED_CODE_VERSION" in os.environ else {}
    environment = {**os.environ, **came_with_job}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=environment)
    if done.returncode:
        raise ValueError(f"{python} does not run: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout.split()
