"""What comes of a comparison's verdicts: the statistics, the report, a table for the terminal."""

from pathlib import Path

from heed.comparison_folder import read_settings


def conclude(folder: Path) -> None:
    """The one place where a comparison's statistics and report are made, of its folder alone."""
    read_settings(folder)
