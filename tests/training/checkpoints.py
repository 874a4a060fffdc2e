"""The newest checkpoint of a folder."""

from pathlib import Path

from training.checkpoint import find_resumption


def latest_checkpoint(checkpoints: Path) -> tuple[Path, int] | None:
    """Returns the newest checkpoint that verifies, and its step; None if none was written."""
    resumption = find_resumption(checkpoints, "the stage")
    return (checkpoints / resumption.name, resumption.step) if resumption.name else None
