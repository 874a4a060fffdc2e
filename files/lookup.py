"""Error messages about files that are not found: in which folder they were looked for, and where they are instead."""

from pathlib import Path

_job_folders: list[Path] = []


def remember_job(file: Path) -> None:
    """Let messages say that a file is next to this job file, if it is there."""
    folder = file.resolve().parent
    if folder not in _job_folders:
        _job_folders.append(folder)


def no_such_file(name: str | Path) -> str:
    """Returns "no such file" for a path that does not exist, with the folder that a relative path was looked up in."""
    path = Path(name)
    if path.is_absolute():
        return "no such file"
    here = Path.cwd()
    beside = next((folder for folder in _job_folders if folder != here and (folder / path).exists()), None)
    hint = f"; {beside / path} exists, so run heed in {beside}, or write that path" if beside else ""
    return f"no such file in {here}, where relative paths start{hint}"
