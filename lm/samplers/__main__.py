"""`python -m lm.samplers ENGINE MODEL PRECISION SEED PIPE`: test a sampler, with a JSON line per check into a pipe.

`heed verify-sampler` runs this with an engine's own Python, if it has one. Engines may print anything and may end the
process, so checks have a separate pipe (a file descriptor), and a last line says how many there were.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from files.importing import load_function
from lm.config import Precision
from lm.samplers.engine import LoadEngine
from lm.samplers.verify import verify_sampler

VLLM = "vllm"
MISTAKE, DONE = "mistake", "done"  # keys of the last line: the user's mistake, or the number of checks


def loader_of(engine: str) -> LoadEngine:
    """Returns the loader of an engine: "heed", "vllm", or a function, "FILE.py:FUNCTION" or "MODULE:FUNCTION".

    Raises: ValueError for anything else.
    """
    if engine == "heed":
        from lm.samplers.own import HeedSampler

        return HeedSampler.load
    if engine == VLLM:
        from lm.samplers.vllm_engine import VLLMSampler

        return VLLMSampler.load
    if ":" not in engine:
        raise ValueError(f'engine {engine!r}: "heed", "vllm", "FILE.py:FUNCTION" or "MODULE:FUNCTION" was expected')
    return load_function(engine, "sampler")


def main(engine: str, model: str, precision: Precision, seed: str, pipe: str) -> int:
    with os.fdopen(int(pipe), "w") as checks:

        def write(line: object) -> None:
            print(json.dumps(line), file=checks, flush=True)

        try:
            found = verify_sampler(
                loader_of(engine),
                Path(model),
                precision=precision,
                seed=int(seed),
                tell=lambda check: write(asdict(check)),
            )
        except ValueError as error:
            write({MISTAKE: str(error)})
            return 2
        write({DONE: len(found.checks)})
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
