"""`python -m lm.samplers ENGINE MODEL PRECISION SEED TEAM_SIZE PIPE`: test a sampler, with a JSON line per check into a
pipe.

`heed verify-sampler` runs this with an engine's own Python, if it has one. Engines may print anything and may end the
process, so checks have a separate pipe (a file descriptor), and a last line says how many there were. With a TEAM_SIZE
above 1, so many processes run the same test together, each with a share of the weights; RANK, WORLD_SIZE, LOCAL_RANK,
MASTER_ADDR and MASTER_PORT identify them. Each sees one GPU at most, so LOCAL_RANK is 0.
"""

import json
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path

from files.importing import load_function
from lm.config import Precision
from lm.samplers.engine import LoadEngine
from lm.samplers.verify import verify_sampler

VLLM = "vllm"
TIMEOUT_SECONDS = 600.0  # that ranks of a team wait for each other
MISTAKE, DONE = "mistake", "done"  # keys of the last line: the user's mistake, or the number of checks


def loader_of(engine: str, team_size: int) -> LoadEngine:
    """Returns the loader of an engine: "heed", "vllm", or a function, "FILE.py:FUNCTION" or "MODULE:FUNCTION".

    Raises: ValueError for anything else, and for a team whose ranks would share the weights of a function's engine.
    """
    if engine == "heed":
        from lm.samplers.own import HeedSampler
        from lm.tensor_parallel import Rendezvous, Team

        if team_size == 1:
            return HeedSampler.load
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return partial(HeedSampler.load, team=Team.join(Rendezvous(host, port, team_size, TIMEOUT_SECONDS)))
    if engine == VLLM:
        from lm.samplers.vllm_engine import VLLMSampler

        return partial(VLLMSampler.load, tensor_parallel_size=team_size)
    if team_size > 1:
        raise ValueError(
            f"--tensor-parallel-size is {team_size}; 1 was expected for an engine other than heed and vllm"
        )
    if ":" not in engine:
        raise ValueError(f'engine {engine!r}: "heed", "vllm", "FILE.py:FUNCTION" or "MODULE:FUNCTION" was expected')
    return load_function(engine, "sampler")


def main(engine: str, model: str, precision: Precision, seed: str, team_size: str, pipe: str) -> int:
    with os.fdopen(int(pipe), "w") as checks:

        def write(line: object) -> None:
            print(json.dumps(line), file=checks, flush=True)

        try:
            found = verify_sampler(
                loader_of(engine, int(team_size)),
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
