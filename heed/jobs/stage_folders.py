"""The folder of a stage: kept if the stage continues, replaced if it runs again, restored if it then cannot begin."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import tomli_w

from files.atomic import write_json, write_text
from heed.jobs.inputs import what_changed
from stages.contract import StageWaitsError
from stages.lineage import LINEAGE, Inputs, started_with
from stages.progress import console

REPLACED = "replaced"
_OPENED = ("inputs.json", "config.toml")  # what `open_folder` writes


def is_replaced(folder: Path, inputs: Inputs, *, forced: bool) -> bool:
    """Returns whether the stage has an earlier folder and starts over: its inputs changed, or a rerun is forced."""
    is_interrupted = started_with(folder) == inputs.fingerprint and not (folder / LINEAGE).exists()
    return folder.exists() and (forced or not is_interrupted)


@contextmanager
def open_folder(folder: Path, inputs: Inputs, *, forced: bool) -> Iterator[None]:
    """Keep the folder of an interrupted stage with the same inputs; otherwise move it away and start an empty one.

    If the block fails, or is interrupted, before it has written anything, the folder that was moved away is put back.
    """
    kept = None
    if is_replaced(folder, inputs, forced=forced):
        kept = put_aside(folder, "forced" if forced else what_changed(folder, inputs))
    try:
        folder.mkdir(exist_ok=True)
        write_json(folder / "inputs.json", {"fingerprint": inputs.fingerprint})
        config: dict[str, Any] = dict(inputs.config)
        write_text(folder / "config.toml", tomli_w.dumps({"seed": inputs.seed, **config}))
        yield
    except StageWaitsError:
        raise
    except BaseException:  # Ctrl-C too
        if kept is not None:
            _put_back(folder, kept)
        raise


def put_aside(folder: Path, reason: str = "changed") -> Path:
    """Move a replaced stage's folder into `replaced/`, where nothing is deleted. Returns its new path."""
    target = folder.parent / REPLACED
    target.mkdir(exist_ok=True)
    numbers = (path.name.removeprefix(f"{folder.name}-") for path in target.glob(f"{folder.name}-*"))
    kept = target / f"{folder.name}-{1 + max((int(number) for number in numbers if number.isdigit()), default=0)}"
    folder.rename(kept)
    console.print(f"{folder.name}: runs again ({reason}); the earlier result is kept in {kept}", markup=False)
    return kept


def _put_back(folder: Path, kept: Path) -> None:
    """Undo `put_aside`, unless the new run of the stage has written something or the storage is unavailable."""
    if any(path.is_file() and path.name not in _OPENED for path in folder.rglob("*")):
        return
    with suppress(OSError):
        for name in _OPENED:
            (folder / name).unlink(missing_ok=True)
        shutil.rmtree(folder)
        kept.rename(folder)
        console.print(f"{folder.name}: failed before it began; the earlier result is in {folder} again", markup=False)
        kept.parent.rmdir()  # unless it holds other results
