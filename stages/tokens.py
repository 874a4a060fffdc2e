"""A run's tokens: the driver tokenizes a stage's texts once, before ranks have a place, into files that all ranks map.

`RUN/tokens/STAGE-NAME-KEY/` holds the tokens; the key is a hash of whatever they depend on.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from lm.tokenizer import Tokenizer
from stages.lineage import path_hash
from stages.run import StageRun
from training.data import SourceConfig
from training.tokens import Part, write_arrays

TOKENS = "tokens"
FORMAT = 3  # of the files; another one makes them again
KEY_DIGITS = 16

Parts = Callable[[int], Iterator[Part]]  # from a number of a row on


def token_folder(
    run: StageRun,
    name: str,
    tokenizer: Tokenizer,
    sources: Sequence[SourceConfig],
    arrays: Sequence[str],
    parts: Parts,
    **settings: int | str,
) -> Path:
    """The folder with the tokens of these sources, which `parts` writes unless they are there.

    `settings` are the values besides tokenizer and sources that the tokens, or the checks of them, depend on. Tokens of
    the same stage and name with another key are removed: they can be made again.

    Raises: ValueError of `parts`, naming file, line and field.
    """
    read = [[data.model_dump(mode="json", exclude={"source"}), path_hash(data.source)] for data in sources]
    made_from = json.dumps([FORMAT, tokenizer.sha256, sorted(settings.items()), read], sort_keys=True)
    prefix = f"{run.name}-{name}-"
    folder = run.run_folder / TOKENS / f"{prefix}{hashlib.sha256(made_from.encode()).hexdigest()[:KEY_DIGITS]}"
    folder.parent.mkdir(exist_ok=True)
    write_arrays(folder, arrays, parts)
    for other in folder.parent.glob(f"*{prefix}{'?' * KEY_DIGITS}"):
        if other != folder:
            shutil.rmtree(other)
    return folder
