"""`python -m samplers ENGINE MODEL PRECISION SEED`: the test of a sampler, a JSON line per check.

`heed verify-sampler` runs it under the Python of engines that have one of their own.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from files.python_names import load_function
from samplers.engine import LoadEngine
from samplers.verify import verify_sampler
from training.config import Precision

VLLM = "vllm"
MISTAKE = 2  # exit code of a user's mistake, which is the last line


def loader_of(engine: str) -> LoadEngine:
    """What makes a sampler: "heed", "vllm", or a function, "FILE.py:FUNCTION" or "MODULE:FUNCTION".

    Raises: ValueError for anything else.
    """
    if engine == "heed":
        from samplers.own import HeedSampler

        return HeedSampler.load
    if engine == VLLM:
        from samplers.vllm_engine import VLLMSampler

        return VLLMSampler.load
    if ":" not in engine:
        raise ValueError(f'engine {engine!r}: "heed", "vllm", "FILE.py:FUNCTION" or "MODULE:FUNCTION" was expected')
    return load_function(engine, "sampler")


def main(engine: str, model: str, precision: Precision, seed: str) -> int:
    try:
        verify_sampler(
            loader_of(engine),
            Path(model),
            precision=precision,
            seed=int(seed),
            tell=lambda check: print(json.dumps(asdict(check)), flush=True),
        )
    except ValueError as error:
        print(json.dumps(str(error)), flush=True)
        return MISTAKE
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))  # type: ignore[arg-type]
